"""Collectives read from compiled programs whose collectives are known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mxjax.sharding.hlo_collectives import collectives

MESH_SHAPE = {"dp": 2, "ep": 2, "tp": 2}


@pytest.fixture(scope="module")
def found_in():
    """Function of one device's [4] fp32 and a number -> what it compiles to."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(*MESH_SHAPE.values()), tuple(MESH_SHAPE))

    def compile_(function):
        program = jax.jit(
            jax.shard_map(
                function,
                mesh=mesh,
                in_specs=(PartitionSpec(tuple(MESH_SHAPE)), PartitionSpec()),
                out_specs=PartitionSpec(tuple(MESH_SHAPE)),
                check_vma=False,
            )
        )
        text = program.lower(jnp.zeros(32), jnp.int32(3)).compile().as_text()
        return collectives(text)

    return compile_


@pytest.mark.parametrize("axes", [("tp",), ("ep",), ("dp", "tp"), ("dp", "ep", "tp")], ids=str)
def test_axes_and_bytes_of_every_kind(found_in, axes):
    n = 2 ** len(axes)

    def function(x, _):
        total = lax.psum(x, axes)
        gathered = lax.all_gather(x, axes, tiled=True)
        scattered = lax.psum_scatter(gathered**2, axes, tiled=True)
        parts = lax.all_to_all(gathered.reshape(n, 4), axes, 0, 0)
        return total + scattered + parts.sum(0)

    found = {c.kind: c for c in found_in(function)}
    assert {c.axes(MESH_SHAPE) for c in found.values()} == {axes}
    assert all(c.times == 1 and c.times_known and not c.in_loop for c in found.values())
    payload = {kind: c.payload_bytes for kind, c in found.items()}
    whole = 4 * n * 4
    assert payload == {
        "all-reduce": 16,
        "all-gather": whole,
        "reduce-scatter": whole,
        "all-to-all": whole,
    }
    sent = {kind: c.sent_bytes for kind, c in found.items()}
    assert sent == {
        "all-reduce": 2 * 16 * (n - 1) // n,
        "all-gather": 16 * (n - 1),
        "reduce-scatter": 16 * (n - 1),
        "all-to-all": 16 * (n - 1),
    }


def test_loops_multiply(found_in):
    """A ring in a scan of 3 in a loop of 5: 15 permutes; all-reduced once outside."""

    def function(x, _):
        def ring(x, _):
            return lax.ppermute(x, "ep", [(0, 1), (1, 0)]), None

        x = lax.fori_loop(0, 5, lambda _, x: lax.scan(ring, x, length=3)[0] + 1, x)
        return lax.psum(x, "dp")

    permute, reduce = sorted(found_in(function), key=lambda c: c.kind, reverse=True)
    assert (permute.kind, permute.axes(MESH_SHAPE), permute.times) == (
        "collective-permute",
        ("ep",),
        15,
    )
    assert permute.times_known
    assert permute.in_loop
    assert permute.sent_bytes == permute.payload_bytes == 16
    assert (reduce.kind, reduce.axes(MESH_SHAPE), reduce.times) == ("all-reduce", ("dp",), 1)


def test_a_loop_of_unknown_length_and_a_branch_say_so(found_in):
    def loop(x, n):
        return lax.fori_loop(0, n, lambda _, x: lax.psum(x, "tp"), x)

    def branch(x, n):
        return lax.cond(n > 2, lambda x: lax.psum(x, "tp"), lambda x: x, x)

    for function, in_loop in [(loop, True), (branch, False)]:
        (found,) = found_in(function)
        assert (found.times, found.times_known, found.in_loop) == (1, False, in_loop)


def test_a_device_that_sends_to_itself_is_no_collective(found_in):
    assert found_in(lambda x, _: lax.ppermute(x, "tp", [(0, 0), (1, 1)])) == []


PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: bf16[2,3]) -> bf16[2,3] {{
  %x = bf16[2,3]{{1,0}} parameter(0), metadata={{op_name="x"}}
  {0}
  ROOT %r = bf16[2,3]{{1,0}} copy(%x)
}}
"""
read = partial(str.format, PROGRAM)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tp",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("dp",)),
        ("replica_groups={}", ("dp", "ep", "tp")),
        ("replica_groups=[4,2]<=[8]", ("tp",)),
        ("replica_groups=[2,4]<=[8]", ("ep", "tp")),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("ep",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("dp", "ep")),
        ("replica_groups=mesh['dp'=2,'ep'=2,'tp'=2] {'dp','tp'}", ("dp", "tp")),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}", ("ep",)),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", ("tp",)),
    ],
)
def test_every_form_of_groups(groups, expected):
    line = f"%g = bf16[2,3]{{1,0}} all-reduce(%x), channel_id=1, {groups}, to_apply=%add"
    (found,) = collectives(read(line))
    assert found.axes(MESH_SHAPE) == expected
    assert found.payload_bytes == 12


def test_a_form_of_groups_that_is_not_known_is_an_error():
    line = "%g = bf16[2,3]{1,0} all-reduce(%x), replica_groups=<new>, to_apply=%add"
    with pytest.raises(ValueError, match="replica_groups=<new>"):
        collectives(read(line))


def test_asynchronous_forms_count_once():
    """As the compiler for GPUs writes them: results of a start hold its operands too."""
    lines = """
  %s = (bf16[2,3]{1,0}, bf16[4,3]{1,0}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}
  %d = bf16[4,3]{1,0} all-gather-done(%s)
  %t = ((bf16[4,3]{1,0}), bf16[2,3]{1,0}) reduce-scatter-start(%d), replica_groups=[4,2]<=[8], to_apply=%add
  %e = bf16[2,3]{1,0} reduce-scatter-done(%t)
  %p = (bf16[2,3]{1,0}, bf16[2,3]{1,0}) collective-permute-start(%x), source_target_pairs={{0,4},{4,0}}
  %q = bf16[2,3]{1,0} collective-permute-done(%p)"""
    found = collectives(read(lines))
    assert [(c.kind, c.payload_bytes, c.axes(MESH_SHAPE)) for c in found] == [
        ("all-gather", 24, ("tp",)),
        ("reduce-scatter", 24, ("tp",)),
        ("collective-permute", 12, ("dp",)),
    ]
