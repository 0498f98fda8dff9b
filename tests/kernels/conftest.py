"""What tests of kernels share."""

import json
import os
import subprocess
import sys

import jax
import pytest


@pytest.fixture(scope="session")
def programs_for_h200(cuda_compiler, tmp_path_factory):
    """What to compile, see `compile_for_h200.py` -> {name: program}."""

    def compile_(*names):
        folders = [os.environ.get("PYTHONPATH"), str(cuda_compiler), "."]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # it finds no CUDA libraries
        }
        path = tmp_path_factory.mktemp("h200") / "programs.json"
        command = [sys.executable, "-m", "tests.kernels.compile_for_h200", path, *names]
        subprocess.run(command, env=environment, check=True)
        return json.loads(path.read_text())

    return compile_


@pytest.fixture(autouse=True)
def no_races(capsys):
    """JAX's interpreter of kernels only prints the races that it finds."""
    yield
    jax.effects_barrier()
    assert "RACE DETECTED" not in capsys.readouterr().out
