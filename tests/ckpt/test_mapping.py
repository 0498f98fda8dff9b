"""The mapping tables: complete, of the right shapes, and reversible."""

import dataclasses

import jax
import numpy as np
import pytest

from mxjax.ckpt.mapping import layouts
from mxjax.ckpt.mapping.huggingface import Family, huggingface_table
from mxjax.ckpt.mapping.matching import places
from mxjax.ckpt.mapping.megatron import expert_bias_sections, megatron_table
from mxjax.ckpt.tree import named_leaves
from mxjax.config.schema import MLAConfig, ModelConfig, MoEConfig
from mxjax.models.transformer import Transformer

LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=12,
    ffn_hidden_size=20,
    num_attention_heads=6,
    num_query_groups=2,
    head_dim=4,
    qk_layernorm=True,
    vocab_size=32,
)
GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=12,
    ffn_hidden_size=20,
    num_attention_heads=3,
    vocab_size=32,
    max_position_embeddings=16,
    position_embedding="learned",
    norm="layernorm",
    activation="gelu",
    add_bias_linear=True,
    add_qkv_bias=True,
    tie_embeddings=True,
)
MLA = MLAConfig(q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=5)
DEEPSEEK = ModelConfig(
    num_layers=3,
    hidden_size=12,
    ffn_hidden_size=20,
    num_attention_heads=2,
    mla=MLA,
    vocab_size=32,
    mtp_num_layers=2,
)
LITE = dataclasses.replace(DEEPSEEK, mla=dataclasses.replace(MLA, q_lora_rank=None))
EXPERTS = MoEConfig(
    num_experts=4, moe_ffn_hidden_size=10, shared_expert_intermediate_size=14, first_k_dense=1
)
MODELS = {
    "llama": (LLAMA, MoEConfig()),
    "gpt2": (GPT2, MoEConfig()),
    "mixtral": (LLAMA, MoEConfig(num_experts=4)),
    "deepseek": (DEEPSEEK, EXPERTS),
    "lite": (LITE, EXPERTS),
}


@pytest.mark.parametrize("family", MODELS)
def test_table_covers_each_parameter_once_with_its_shape_and_goes_both_ways(family):
    model, moe = MODELS[family]
    sections = megatron_table(model, moe, zero_centred_gamma=True)
    if moe.num_experts:
        sections += expert_bias_sections(model, moe)
    assert_covers(sections, model, moe, has_bias=moe.num_experts > 0)


HUGGING_FACE = {
    Family.LLAMA: (
        dataclasses.replace(LLAMA, qk_layernorm=False, tie_embeddings=True),
        MoEConfig(),
    ),
    Family.QWEN3: (LLAMA, MoEConfig()),
    Family.QWEN3_MOE: (LLAMA, MoEConfig(num_experts=4, first_k_dense=1)),
    Family.MIXTRAL: (dataclasses.replace(LLAMA, qk_layernorm=False), MoEConfig(num_experts=4)),
    Family.DEEPSEEK_V3: (DEEPSEEK, EXPERTS),
}


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_hugging_face_table_covers_each_parameter_once_and_goes_both_ways(family):
    model, moe = HUGGING_FACE[family]
    sections = huggingface_table(family, model, moe)
    assert_covers(sections, model, moe, has_bias=family is Family.DEEPSEEK_V3)


def assert_covers(sections, model, moe, has_bias):
    transformer = Transformer(model, moe)
    wanted = {f"params.{k}": v.shape for k, v in named_leaves(transformer.infos).items()}
    if has_bias:
        wanted["expert_bias"] = jax.eval_shape(transformer.initial_expert_bias).shape
    rng = np.random.default_rng(0)
    found: dict[str, set] = {}
    for place in places(sections):
        theirs = [rng.integers(-99, 99, t.shape).astype(np.float32) for t in place.rule.theirs]
        ours = place.rule.to_ours(*theirs)
        for leaf, array in zip(place.leaves(), ours, strict=True):
            lead = len(place.index)
            assert array.shape == wanted[leaf][lead:], leaf
            assert place.index not in found.setdefault(leaf, set()), leaf
            found[leaf].add(place.index)
        back = place.rule.to_theirs(*ours)
        for before, after in zip(theirs, back, strict=True):
            np.testing.assert_array_equal(before, after)
    for leaf, indices in found.items():
        lead = len(next(iter(indices)))
        assert indices == set(np.ndindex(*wanted[leaf][:lead])), leaf
    assert found.keys() == wanted.keys()


def test_qkv_rows_are_queries_then_key_then_value_of_each_group():
    heads, groups, width, hidden = 4, 2, 3, 5
    rows = np.arange((heads + 2 * groups) * width * hidden, dtype=np.float32).reshape(-1, hidden)
    q, kv = layouts.split_qkv(rows, groups, heads)
    # Group 0: heads 0 and 1, key 0, value 0; group 1: heads 2 and 3, key 1, value 1.
    head_rows = [rows[i * width : (i + 1) * width] for i in range(8)]
    for head, block in enumerate((0, 1, 4, 5)):
        np.testing.assert_array_equal(q[:, head], head_rows[block].T)
    for which, blocks in enumerate(((2, 6), (3, 7))):
        for group, block in enumerate(blocks):
            np.testing.assert_array_equal(kv[:, which, group], head_rows[block].T)


def test_rotary_pairs_become_halves():
    weight = np.array([[9.0, 0, 1, 2, 3, 4, 5]])
    halves = layouts.pairs_to_halves(weight, 6)
    np.testing.assert_array_equal(halves, [[9, 0, 2, 4, 1, 3, 5]])
    np.testing.assert_array_equal(layouts.halves_to_pairs(halves, 6), weight)


def test_vocabulary_is_cut_or_filled_with_zeros():
    weight = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(layouts.fit_rows(weight, 2), weight[:2])
    np.testing.assert_array_equal(layouts.fit_rows(weight, 4)[3], [0, 0])
