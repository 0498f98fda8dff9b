"""Which collectives a step consists of, read from the compiled program.

On CPU every collective stays as it was written, so each can be accounted for. The compiler for GPUs
merges and moves them; there the amounts are compared.
"""

import math
import re
from collections import Counter

import jax
import pytest
from jax.sharding import NamedSharding

from mxjax.sharding.hlo_collectives import collectives
from mxjax.training.gradients import Objective

VOCAB = {"vocab_size": 72}
"""Neither 72 nor half of it is the size of anything else."""


def count(found, in_loop):
    return Counter(c.kind for c in found if c.in_loop == in_loop)


def reduced(found):
    """How often each shape is all-reduced: XLA merges all-reduces of several values."""
    return Counter(s for c in found if c.kind == "all-reduce" for s in c.shapes)


def num_elements(found, kind):
    """In the results on one device."""
    factor = {"all-gather": lambda n: n, "reduce-scatter": lambda n: 1 / n}.get(kind, lambda n: 1)
    return sum(
        math.prod(shape) * factor(c.group_size)
        for c in found
        if c.kind == kind
        for shape in c.shapes
    )


@pytest.fixture(scope="module")
def compiled_text(mesh_of, packed_batch, abstract_params):
    """Config -> text of its loss and gradients, compiled for CPU."""

    def compile_(config):
        objective = Objective(config, mesh_of(config))
        params = abstract_params(objective)
        bias, key = objective.model.initial_expert_bias(), jax.random.key(0)
        function = jax.jit(objective.loss_and_gradients())
        return function.lower(params, bias, packed_batch(config), key).compile().as_text()

    return compile_


def test_tensor_parallel(small_config, compiled_text):
    """tp 2 with a sequence-sharded residual stream."""
    text = compiled_text(small_config("llama", model=VOCAB, parallel={"tp": 2}))
    found = collectives(text)
    # Attention and MLP each gather the sequence on entering and reduce-scatter on leaving; in the
    # backward pass each turns into the other.
    assert count(found, in_loop=True) == {"all-gather": 4, "reduce-scatter": 4}
    # The same once for the embedding (which is only left) and the head (only entered).
    once = count(found, in_loop=False)
    del once["all-reduce"]
    assert once == {"all-gather": 2, "reduce-scatter": 2}
    assert reduced(found) == {
        (256,): 3,  # tokens: maximum, sum of exponentials, target's logit
        (): 5,  # gradient of the loss, the three losses, needed capacity
        (2, 32): 2,  # scales of the two norms of both layers
        (32,): 1,  # scale of the last norm
    }
    assert not re.search(r"[\[,]72[\],]", text), "a rank holds the whole vocabulary"


@pytest.mark.parametrize(
    ("zero_stage", "num_microbatches", "scattered_in_loop"), [(1, 1, 0), (1, 2, 0), (2, 2, 10)]
)
def test_zero_1_and_2(small_config, compiled_text, zero_stage, num_microbatches, scattered_in_loop):
    """dp 2: one all-gather and one reduce-scatter per parameter leaf, not per layer. Stage 2
    reduce-scatters after each microbatch, in the loop over them."""
    config = small_config(
        "llama",
        parallel={"dp": 2, "zero_stage": zero_stage},
        training={"num_microbatches": num_microbatches},
    )
    found = collectives(compiled_text(config))
    leaves = 10  # 7 of the layers, 2 of the head, the embedding
    assert count(found, in_loop=True) == Counter({"reduce-scatter": scattered_in_loop})
    once = count(found, in_loop=False)
    del once["all-reduce"]
    assert once == Counter({"all-gather": leaves, "reduce-scatter": leaves - scattered_in_loop})
    # The number of targets; the three losses, needed capacity.
    assert reduced(found) == {(1,): 1, (): 4}


def test_expert_parallel_with_zero_3(small_config, compiled_text):
    """ep 2, all-to-all, all other weights gathered in each layer."""
    found = collectives(compiled_text(small_config("mixtral", parallel={"ep": 2, "zero_stage": 3})))
    assert count(found, in_loop=True) == {
        # Two norms, q, kv, out, router, shared up and down, and in the backward pass again. Experts
        # are split over ep and not gathered.
        "all-gather": 8 + 8,
        "reduce-scatter": 8,
        # Rows, experts and weights go, results come back; the same for gradients, without experts.
        "all-to-all": 4 + 3,
    }
    once = count(found, in_loop=False)
    del once["all-reduce"]
    assert once == {"all-gather": 3, "reduce-scatter": 3}  # embedding, head, last norm
    assert reduced(found) == {
        (1,): 1,  # number of targets
        (): 4,  # the three losses, needed capacity
        (2, 8): 1,  # tokens per layer and expert
    }


def test_context_parallel_ring(small_config, compiled_text):
    """cp 4: keys and values go three steps in each pass, and their gradients four, to come home.
    The first step of each pass stands by itself, the other two are one in a loop."""
    found = collectives(compiled_text(small_config("llama", parallel={"cp": 4})))
    # Segment ids go along. Their first step is the same in all layers, and so outside of the loop.
    assert count(found, in_loop=True) == {"collective-permute": 2 * 2 * 2 + 2 * 3 + 2}


def test_context_parallel_all_gather_and_ulysses(small_config, compiled_text):
    """cp 2 x sp 2. Segment ids are gathered outside of the loop over layers."""
    parallel = {"cp": 2, "sp": 2, "cp_method": "allgather"}
    found = collectives(compiled_text(small_config("llama", parallel=parallel)))
    assert count(found, in_loop=True) == {
        "all-to-all": 4 + 4,  # queries, keys and values there, results back; and their gradients
        "all-gather": 2 + 2,  # keys and values, in each pass
        "reduce-scatter": 2,  # their gradients
    }


@pytest.mark.parametrize(
    ("shape", "parallel", "scan_layers"),
    [
        ("llama", {"dp": 2, "zero_stage": 1}, True),
        ("mixtral", {"dp": 2, "ep": 2, "zero_stage": 3}, False),
    ],
    ids=str,
)
def test_gpu_program_reduce_scatters_gradients(
    small_config, mesh_of, compiled_for_h200, shape, parallel, scan_layers
):
    """All gradients, and nothing but figures is all-reduced."""
    config = small_config(
        shape,
        model={"num_layers": 1},
        parallel=parallel,
        training={"compute_dtype": "bfloat16", "scan_layers": scan_layers},
    )
    text = compiled_for_h200(config)
    assert 'custom_call_target="__cublas' in text or "__triton" in text, "not for a GPU"
    assert "multimem" not in text, "NVLink multicast"
    found = collectives(text)

    objective = Objective(config, mesh_of(config))
    infos, mesh = objective.model.infos, objective.mesh

    def elements(rules, infos):
        """Elements on one device under these rules."""
        return sum(
            math.prod(NamedSharding(mesh, rules.spec(info.axes)).shard_shape(info.shape))
            for info in jax.tree.leaves(infos)
        )

    zero = next(iter(objective.zero.values()))  # without stages all parts have the same rules
    stored, compute = zero.stored, zero.compute
    assert num_elements(found, "reduce-scatter") == elements(stored, infos)
    # Tokens per expert; number of targets, three losses, needed capacity.
    assert num_elements(found, "all-reduce") == config.moe.num_experts + 5
    gathered = elements(compute, infos)
    if config.parallel.zero_stage == 3:  # the layer's weights again in the backward pass
        gathered += elements(compute, infos["moe_layers"])
    assert num_elements(found, "all-gather") == gathered
