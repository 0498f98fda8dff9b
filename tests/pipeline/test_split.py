"""F, B and W of real layers against `jax.vjp`, and what they do and keep."""

import collections
import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config.schema import KernelOverrides, KernelsConfig
from mxjax.kernels import attention, attention_block, implementation
from mxjax.kernels.implementation import interpreted, selected
from mxjax.pipeline.graph import trace
from mxjax.pipeline.split import split_layer
from mxjax.remat.layers import policy_of
from mxjax.remat.policy import rematerialise
from mxjax.scoped import scoped
from mxjax.training.gradients import Objective

BF16 = {"compute_dtype": "bfloat16"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPENSIVE = ("dot_general", "top_k", "sort", "gather", "cumsum", "scatter", "scan")


@dataclasses.dataclass
class Case:
    """A layer of a model, as the pipeline calls it, and arguments for it."""

    objective: Objective
    kind: str
    params: dict
    x: jax.Array
    side: tuple
    dy: jax.Array

    def layer(self, weights, x, side):
        batch, key, bias_E = side
        model = self.objective.model
        part, ctx = model.parts[self.kind], model.context(batch, key)

        def run(weights, x, ctx, bias_E):
            return part.bind(weights)(x, ctx, jnp.int32(1), bias_E)

        config = self.objective.config
        policy = policy_of(config.remat, config, self.kind)
        run = rematerialise(run, policy, gathers_weights=False, in_scan=True)
        y, aux = run(weights, x, ctx, bias_E)
        stack = {self.kind: jax.tree.map(lambda a: a[None], aux)}
        loss, counts_LE, needed = self.objective._router(stack, sequence_parallel=False)
        return y, loss, (counts_LE, needed, aux.finite)

    def mapped(self, function):
        """`function(params, x, side, dy)` on a mesh of one device."""
        return jax.shard_map(
            function,
            mesh=self.objective.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )

    def run(self, function):
        fast_to_compile = {"xla_backend_optimization_level": 0}
        run = jax.jit(self.mapped(function), compiler_options=fast_to_compile)
        return run(self.params, self.x, self.side, self.dy)

    def shapes(self, function):
        """Those of its results."""
        return jax.eval_shape(self.mapped(function), self.params, self.x, self.side, self.dy)

    def inspect(self):
        """The layer's split, and the operations of a plain forward and backward pass."""
        found = {}

        def look(params, x, side, dy):
            found["split"] = split_layer(self.layer, params, x, side)
            found["plain"] = trace(self.plain, params, x, side, dy)[0]
            return dy

        self.shapes(look)
        return found["split"], found["plain"]

    def plain(self, params, x, side, dy):
        def run(params, x):
            y, loss, stats = self.layer(params, x, side)
            return (y, loss), stats

        (y, loss), pullback, stats = jax.vjp(run, params, x, has_aux=True)
        d_params, dx = pullback((dy, jnp.ones_like(loss)))
        return (y, loss, stats), dx, d_params

    def in_pieces(self, params, x, side, dy, **options):
        split = split_layer(self.layer, params, x, side, **options)
        *forward, residuals = split.forward(params, x, side)
        dx, cut = split.backward(params, side, residuals, dy)
        kept = list(itertools.compress(residuals, split.for_weights))
        grads = split.weight_gradients(params, side, kept, cut)
        both = split.backward_both(params, side, residuals, dy)
        return (tuple(forward), dx, grads), (tuple(forward), *both)


@pytest.fixture
def make_case(small_config, mesh_of, packed_batch):
    def make(shape, kind, **changes):
        config = small_config(shape, **changes)
        objective = Objective(config, mesh_of(config))
        rng = np.random.default_rng(0)
        dtype = jnp.dtype(config.training.compute_dtype)

        def normal(*shape, std=1.0):
            return jnp.asarray(std * rng.normal(size=shape), dtype)

        batch = {name: jnp.asarray(a[0]) for name, a in packed_batch(config).items()}
        infos = objective.model.parts[kind].layer_infos
        bias_E = jnp.asarray(normal(config.moe.num_experts, std=0.1), jnp.float32)
        stream = (*batch["tokens"].shape, config.model.hidden_size)
        return Case(
            objective,
            kind,
            params=jax.tree.map(lambda info: normal(*info.shape, std=0.2), infos),
            x=normal(*stream),
            side=(
                batch,
                jax.random.key(3) if config.model.hidden_dropout else None,
                bias_E if kind == "moe_layers" else None,
            ),
            dy=normal(*stream),
        )

    return make


def num_expensive(operations):
    names = [operation.name for operation in operations]
    return collections.Counter(name for name in names if name in EXPENSIVE)


def bytes_of(shapes):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in shapes)


CASES = {
    "llama": ("llama", "dense_layers", {"model": DROPOUT, "remat": "full"}),
    "experts and latent attention": ("deepseek_v3", "moe_layers", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_equal_the_whole(make_case, name):
    """Output, statistics, input gradient and weight gradients are those of `jax.vjp`, with B and W
    apart and in one."""
    shape, kind, changes = CASES[name]
    case = make_case(shape, kind, **changes)
    expected = case.run(case.plain)
    for found in case.run(case.in_pieces):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            scale = np.max(np.abs(np.asarray(b, np.float32))) + 1e-30
            difference = np.asarray(a, np.float32) - np.asarray(b, np.float32)
            assert np.max(np.abs(difference)) <= 1e-6 * scale


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    ("shape", "kind", "changes"),
    [
        ("llama", "dense_layers", {"model": DROPOUT}),
        ("deepseek_v3", "moe_layers", {"training": BF16}),
    ],
    ids=["llama", "deepseek_v3"],
)
def test_nothing_expensive_is_done_twice(make_case, shape, kind, changes, remat):
    """Products, sorts and gathers of F, B and W together are those of the plain passes, a recompute
    policy's own repetitions included; W has a third of the products that the passes need."""
    case = make_case(shape, kind, remat=remat, **changes)
    split, plain = case.inspect()
    done = {name: num_expensive(program.operations) for name, program in split.programs.items()}
    assert done["F"] + done["B"] + done["W"] == num_expensive(plain.needed(plain.outputs))
    assert done["B"] + done["W"] == done["BW"]
    products = {name: counts["dot_general"] for name, counts in done.items()}
    matrices = sum(len(info.shape) > 1 for info in jax.tree.leaves(case.params))
    assert products["W"] == matrices
    # The last product of the layer needs no repetition, nor does that of the experts.
    last = 2 if kind == "moe_layers" else 1
    repeated = {"none": 0, "dots": 1, "full": products["F"] - last}[remat]
    assert products["B"] == 2 * products["F"] - matrices + repeated


def test_attention_in_a_loop_is_cut_around(make_case, monkeypatch):
    """Above LONG_SEQUENCE attention is a scan, which stays whole: once in F, once in B."""
    monkeypatch.setattr(attention, "LONG_SEQUENCE", 16)
    monkeypatch.setattr(attention_block, "TILE_ROWS", 8)
    case = make_case("llama", "dense_layers")
    split, _ = case.inspect()
    scans = {name: num_expensive(p.operations)["scan"] for name, p in split.programs.items()}
    assert scans["B"] == scans["BW"] > 0
    assert scans["W"] == 0
    expected = case.run(case.plain)
    for found in case.run(case.in_pieces):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * (np.max(np.abs(b)) + 1e-30))


def test_what_a_llama_layer_keeps(make_case):
    """In the model's precision: inputs of both norms (2 of hidden size), queries, keys and values
    (1.5 here), output of attention (1), gate and value of the MLP (3), so 7.5 times tokens x hidden
    x 2 bytes; beside them the probabilities of attention, where it is not cuDNN's."""
    case = make_case("llama", "dense_layers", training=BF16)
    split, _ = case.inspect()
    B, S, H = case.x.shape
    probabilities = [a for a in split.residuals if a.dtype == jnp.float32]
    assert [math.prod(a.shape) for a in probabilities] == [B * 8 * S * S]
    rest = [a for a in split.residuals if a.dtype == jnp.bfloat16]
    assert bytes_of(rest) == 7.5 * B * S * H * 2
    assert len(rest) + 1 == len(split.residuals)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
@pytest.mark.parametrize("planned", ["no", "shapes"])
def test_kernels_of_cheap_operations_leave_as_much(make_case, planned, device, monkeypatch):
    """Norms, activation and rotary embedding by kernels are made again like those by XLA, also in
    plans from shapes, which have the kernels' names and nothing in them; with the blocks of a
    tuning table, which takes another kernel for the activation."""
    model = {"hidden_size": 128, "head_dim": 16, "ffn_hidden_size": 128}
    case = make_case("llama", "dense_layers", training=BF16, model=model)
    ops = dict.fromkeys(("rms_norm", "add_rms_norm", "swiglu", "rope"), "mosaic")
    with scoped(implementation.plans, planned):
        by_xla, _ = case.inspect()
        monkeypatch.setattr(implementation, "device_kind", lambda: device)
        with interpreted(), selected(KernelsConfig(overrides=KernelOverrides(**ops))):
            split, plain = case.inspect()
    names = [op.eqn.params["name"] for op in plain.operations if op.name == "mpmd_map"]
    elementwise = "tiles_kernel" if device == "cpu" else "registers_kernel"
    assert set(names) == {elementwise, "rows_kernel", "rotation_kernel"}
    assert bytes_of(split.residuals) == bytes_of(by_xla.residuals)
    assert bytes_of(split.cut) <= bytes_of(by_xla.cut)


def test_the_weights_gradients_run_no_kernel_that_the_inputs_gradient_ran(make_case):
    """They get its results, such as the gradient of the activation's input; what they make again is
    of the forward pass."""
    case = make_case(
        "llama", "dense_layers", training=BF16, model={"hidden_size": 128, "head_dim": 16}
    )
    ops = dict.fromkeys(("rms_norm", "add_rms_norm", "swiglu", "rope"), "mosaic")
    with interpreted(), selected(KernelsConfig(overrides=KernelOverrides(**ops))):
        split, _ = case.inspect()
    of = {
        name: {id(op): op.eqn.params["name"] for op in program.operations if op.name == "mpmd_map"}
        for name, program in split.programs.items()
    }
    assert of["B"]
    assert of["W"]
    assert of["B"].keys().isdisjoint(of["W"])
    B, S, F = *case.x.shape[:2], case.objective.config.model.ffn_hidden_size
    assert B * S * 2 * F in [math.prod(value.shape) for value in split.cut]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("asked", [True, False])
def test_gradients_of_matrices_leave_their_products_in_fp32(make_case, remat, asked):
    """In bf16, if asked to. Others stay as they are."""
    case = make_case("llama", "dense_layers", training=BF16, remat=remat)
    stats, dx, plain = case.shapes(case.plain)
    of_W, of_BW = case.shapes(partial(case.in_pieces, fp32_gradients=asked))
    for grads in (of_W[2], of_BW[2]):
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
            assert got.shape == want.shape
            wide = asked and len(want.shape) > 1
            assert got.dtype == (jnp.float32 if wide else jnp.bfloat16)
    for got, want in zip(jax.tree.leaves(of_W[:2]), jax.tree.leaves((stats, dx)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_dropout_masks_are_made_again(make_case):
    """They depend on a key alone: F leaves as much with dropout as without."""
    kept = [
        sorted(
            (a.shape, str(a.dtype))
            for a in make_case("llama", "dense_layers", model=model).inspect()[0].residuals
        )
        for model in ({"attention_implementation": "xla"}, DROPOUT)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("shape", ["llama", "deepseek_v3"])
def test_nothing_is_kept_that_weights_and_side_inputs_give(make_case, shape):
    """Casts of weights, rotary tables, masks: fp32 weights computed with in bf16."""
    case = make_case(shape, "dense_layers", training=BF16)
    cast = case.layer

    def layer(weights, x, side):
        return cast(jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights), x, side)

    case.layer = layer
    case.params = jax.tree.map(lambda a: a.astype(jnp.float32), case.params)
    split, _ = case.inspect()
    B = case.x.shape[0]
    # Beside values of this batch only gradients of norms' scales, which B has at hand.
    assert all(value.shape[0] == B for value in split.residuals)
    assert all(value.shape[0] == B or len(value.shape) == 1 for value in split.cut)


def test_full_recompute_keeps_the_input_alone(make_case):
    case = make_case("llama", "dense_layers", remat="full")
    split, _ = case.inspect()
    assert [value.shape for value in split.residuals] == [case.x.shape]
    # What B has computed again, W need not: it gets it, for each matrix the input and the gradient
    # of the output, and no gradient of a matrix.
    matrices = {a.shape for a in jax.tree.leaves(case.params) if len(a.shape) > 1}
    assert matrices.isdisjoint(value.shape for value in split.cut)
