"""`transformers` loads what mxjax exports, finds every tensor, and computes the same."""

from pathlib import Path

import pytest

from mxjax.ckpt.huggingface.exporting import export_huggingface
from mxjax.ckpt.importing import import_checkpoint

pytestmark = pytest.mark.interop

DATA = Path(__file__).parents[2] / "data" / "huggingface"


def test_transformers_computes_its_own_logits_from_an_export_of_an_import(foreign, tmp_path):
    """With multi-token prediction of DeepSeek-V3, and weights that came in fp8."""
    arguments = []
    for folder in sorted(DATA.iterdir()):
        run, out = tmp_path / "runs" / folder.name, tmp_path / folder.name
        import_checkpoint(folder, run, progress=False)
        export_huggingface(run, out, dtype=None, max_shard_size="20KB", progress=False)
        arguments += [out, folder / "reference.npz"]
    lines = foreign("check_huggingface.py", *arguments).splitlines()
    assert len([line for line in lines if "logits differ by" in line]) == len(arguments) // 2 + 1
