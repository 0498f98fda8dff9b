"""Logical axes, rules and the mesh."""

import jax
import pytest
from jax.sharding import PartitionSpec

from mxjax.config import ModelConfig, MoEConfig, ParallelConfig
from mxjax.models.transformer import Transformer
from mxjax.sharding.mesh import AXES, build_mesh
from mxjax.sharding.rules import ShardingRules, compute_rules, stored_rules

MODEL = ModelConfig(num_query_groups=2)


def test_a_mesh_axis_may_split_one_dim_only():
    with pytest.raises(ValueError, match="'tp' splits both 'heads' and 'ffn'"):
        ShardingRules().spec(("heads", "ffn"))


def test_an_unknown_logical_axis_is_named_with_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown logical axis 'headz'; known: layers, modules, vocab"
    ):
        ShardingRules().spec(("headz",))


def test_zero_adds_the_data_axes_to_the_hidden_dim():
    parallel = ParallelConfig(dp=2, ep=2, tp=2, zero_stage=1)
    dims = ("layers", "hidden", "heads", "head_dim")
    assert compute_rules(parallel, MODEL).spec(dims) == PartitionSpec(None, None, "tp", None)
    data = ("dp", "ep", "cp", "sp")
    assert stored_rules(parallel, MODEL).spec(dims) == PartitionSpec(None, data, "tp", None)
    expert = stored_rules(parallel, MODEL).spec(("expert", "expert_ffn", "expert_hidden"))
    assert expert == PartitionSpec("ep", "tp", ("dp", "cp", "sp"))


def test_folding_spreads_whole_experts_over_ep_and_tp():
    rules = compute_rules(ParallelConfig(ep=2, tp=2, expert_tensor_parallel=False), MODEL)
    assert rules.spec(("expert", "expert_ffn")) == PartitionSpec(("ep", "tp"), None)


@pytest.mark.parametrize(("tp", "split"), [(1, "tp"), (2, "tp"), (4, None)])
def test_key_value_groups_are_whole_where_tp_has_more_ranks(tp, split):
    rules = compute_rules(ParallelConfig(tp=tp), MODEL)
    assert rules.spec(("kv_heads",)) == PartitionSpec(split)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_every_parameter_of_every_family_has_a_placement(zero_stage):
    """One logical name (or None) a dim, valid under all rules; none above 64 KiB stays unsplit."""
    parallel = ParallelConfig(dp=2, ep=2, tp=2, zero_stage=zero_stage)
    moe = MoEConfig(num_experts=8, first_k_dense=1, shared_expert_intermediate_size=512)
    for model, experts in [
        (MODEL, MoEConfig()),
        (MODEL, moe),
        (
            ModelConfig(
                norm="layernorm", activation="gelu", position_embedding="learned",
                add_bias_linear=True, add_qkv_bias=True,
            ),
            MoEConfig(),
        ),
    ]:  # fmt: skip
        rules = stored_rules(parallel, model)
        for path, info in jax.tree_util.tree_leaves_with_path(Transformer(model, experts).infos):
            assert len(info.axes) == len(info.shape), path
            spec = rules.spec(info.axes)
            large = 4 * int(jax.numpy.prod(jax.numpy.array(info.shape))) > 1 << 16
            if large and zero_stage:
                assert any(spec), f"{path} is not split"


def test_mesh_has_all_six_axes_with_tp_innermost():
    mesh = build_mesh(ParallelConfig(dp=2, ep=2, tp=2))
    assert mesh.axis_names == AXES
    assert [d.id for d in mesh.devices.reshape(2, 2, 2)[0, 0]] == [0, 1]


@pytest.mark.parametrize("sizes", [{"dp": -1}, {"dp": 3}], ids=str)
def test_mesh_sizes_must_multiply_to_the_devices(sizes):
    with pytest.raises(ValueError, match="do not multiply to the 8 devices"):
        build_mesh(ParallelConfig(**sizes))
