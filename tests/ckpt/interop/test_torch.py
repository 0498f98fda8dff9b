"""Real PyTorch reads the files that our writers write, without running pickled code."""

import sys

import pytest

pytestmark = pytest.mark.interop


def test_torch_reads_what_we_write(foreign, tmp_path):
    script = "../torch_interop.py"
    foreign(script, "rewrite", tmp_path / "files", python=sys.executable)
    assert "reads" in foreign(script, "check", tmp_path / "files")
