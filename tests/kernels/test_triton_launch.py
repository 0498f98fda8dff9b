"""Starting Triton kernels, as far as no GPU is needed for it."""

import os
import sys

import pytest

from mxjax.kernels import triton_launch


@pytest.mark.parametrize("folder", [None, "/somewhere"])
def test_importing_jax_triton_leaves_tritons_cache_to_others(tmp_path, monkeypatch, folder):
    """It sets the variable to nothing, and `torch.compile` fails after that."""
    (tmp_path / "jax_triton.py").write_text(
        "import os\nos.environ['TRITON_CACHE_DIR'] = ''\ntriton_call = len\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    if folder is None:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    assert triton_launch.jax_triton_module().triton_call is len
    assert os.environ.get("TRITON_CACHE_DIR") == folder
    monkeypatch.delitem(sys.modules, "jax_triton")
