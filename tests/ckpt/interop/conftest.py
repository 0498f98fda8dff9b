"""The environment with real PyTorch and megatron-core, and running something in it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def environment():
    """The folder that `make_environment.sh` fills, if that was not done yet: ``MXJAX_INTEROP``, or
    one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("MXJAX_INTEROP") or cache / "mxjax" / "interop")
    made = subprocess.run(
        [HERE / "make_environment.sh", folder], env=_plain(), capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def foreign(environment):
    """Runs a script of this folder, with its arguments, in that environment or another Python."""

    def run(script, *arguments, megatron="0.19.2", python=environment / "venv/bin/python"):
        done = subprocess.run(
            [python, (HERE / script).resolve(), *map(str, arguments)],
            env=_plain() | {"PYTHONPATH": str(environment / megatron), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def judge(foreign, tmp_path_factory):
    """Has a release of megatron-core do jobs, see `megatron_judge.py`."""

    def run(version, jobs):
        file = tmp_path_factory.mktemp("jobs") / "jobs.json"
        file.write_text(json.dumps(jobs))
        foreign("megatron_judge.py", file, megatron=version)

    return run


def _plain():
    """Without what belongs to this environment, and with compiled files being kept: imports of
    PyTorch and Megatron take three times as long without."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
    return {key: value for key, value in os.environ.items() if key not in ours}
