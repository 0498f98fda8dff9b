"""A run says what computes its attention."""

import pytest
from jax.sharding import AbstractMesh

from mxjax.config import load_config
from mxjax.training.attention_note import attention_note

CPU = (
    "xla, with a dense document mask (mosaic: its kernels are for NVIDIA Hopper GPUs and this is "
    "'cpu'; cudnn: no NVIDIA GPU)"
)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([], CPU),
        (["model.attention_implementation=xla"], "xla, with a dense document mask"),
        (["data.document_mask=false"], "xla (cudnn: no NVIDIA GPU)"),
        (
            ["training.seq_length=192"],
            "xla, with a dense document mask (mosaic: a sequence, or a block of it, of 192 tokens "
            "is no multiple of 128; cudnn: no NVIDIA GPU)",
        ),
    ],
)
def test_note(tmp_path, overrides, note):
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {head_dim: 64}\ntraining: {seq_length: 128, compute_dtype: bfloat16}\n"
    )
    assert attention_note(load_config(config, overrides), AbstractMesh((), ())) == note
