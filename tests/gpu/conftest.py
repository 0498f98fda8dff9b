"""Tests here need a GPU: on CPUs, which is what tests get by default, they would show nothing."""

import jax
import pytest


@pytest.fixture(autouse=True)
def on_a_gpu():
    """JAX's default device is one."""
    if jax.default_backend() != "gpu":
        pytest.fail(
            f"JAX runs on {jax.default_backend()} here; set JAX_PLATFORMS=cuda,cpu for tests that "
            "need GPUs"
        )
