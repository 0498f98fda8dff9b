"""What tests of kernels share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def no_races(capsys):
    """JAX's interpreter of kernels only prints the races that it finds."""
    yield
    jax.effects_barrier()
    assert "RACE DETECTED" not in capsys.readouterr().out
