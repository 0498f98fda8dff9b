"""What is measured: each op at the shapes of real models, and what it must at least move.

A family of ops has a function `cases(small) -> list[Case]`; `all_cases` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.kernels.dropout import bias_dropout_add
from mxjax.kernels.gelu import gelu
from mxjax.kernels.implementation import shape_class
from mxjax.kernels.mosaic_stream import TileBlocks
from mxjax.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mxjax.kernels.norm_mosaic import RowBlocks
from mxjax.kernels.rope import apply_rope
from mxjax.kernels.rope_mosaic import RopeBlocks
from mxjax.kernels.swiglu import swiglu

DTYPE = jnp.bfloat16


@dataclass(frozen=True)
class Work:
    """What a pass must do at least."""

    bytes: int
    """Each input read once, each output written once."""
    flops: int = 0
    """Of matrix products."""


@dataclass(frozen=True)
class Case:
    """One op at one shape."""

    op: str
    """Name in the tuning tables and in `kernels.overrides`, where attention is not: see
    `model.attention_implementation`."""
    name: str
    """Of the case; unique."""
    run: Callable[..., Any]
    """(*arguments, implementation, blocks) -> outputs."""
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    shape_class: str
    """As the op gives it to `choose`."""
    forward: Work
    both: Work | None
    """Forward and backward; None: there is no gradient."""
    differentiable: tuple[int, ...] = ()
    """Places of the arguments that get gradients; none named: all."""
    make: Callable[[jax.Array], tuple] | None = None
    """Random key -> arguments; None: random numbers, where all arguments are floats."""
    implementations: tuple[str, ...] = ("xla", "mosaic")
    """Of ours; one that cannot run here is left out."""
    blocks: tuple[Any, ...] = ()
    """Block sizes, dataclasses, that tuning tries; (None,): the kernel has none. Empty: there is
    nothing to tune."""
    peer: str | None = None
    """Name of the case in `peers.py`."""
    peer_sizes: tuple[int, ...] = ()
    """What the peer takes."""


def all_cases(small: bool) -> list[Case]:
    """Every case; `small`: of shapes that a CPU runs at once."""
    # Which take `Case` from here.
    from mxjax.kernels.bench.attention import attention_cases
    from mxjax.kernels.bench.moe import moe_cases
    from mxjax.kernels.bench.vocabulary import vocabulary_cases

    return [
        *elementwise_cases(small),
        *attention_cases(small),
        *vocabulary_cases(small),
        *moe_cases(small),
    ]


TILES = tuple(
    TileBlocks(rows=rows, stages=stages, per_multiprocessor=blocks)
    for rows, stages, blocks in (
        *((8, 2, 6), (8, 4, 4), (16, 2, 4), (16, 3, 3)),
        *((16, 4, 2), (32, 2, 2), (32, 2, 3), (32, 3, 2)),
    )
)
IN_REGISTERS = tuple(TileBlocks(rows=1, columns=columns, stages=0) for columns in (512, 1024, 2048))
"""For ops without sums over rows and without a seed."""
ROWS = tuple(
    RowBlocks(rows=rows, stages=stages, per_multiprocessor=blocks)
    for rows, stages, blocks in ((0, 0, 2), (0, 2, 2), (0, 2, 3), (0, 0, 4))
)
TURNS = tuple(
    RopeBlocks(rows=rows, heads=heads, per_multiprocessor=blocks)
    for rows, heads, blocks in ((16, 4, 4), (32, 2, 4), (32, 4, 3), (64, 2, 3), (64, 4, 1))
)


def elementwise_cases(small: bool) -> list[Case]:
    """The fused elementwise ops at the sizes of Llama-3-8B (GELU: of a GPT of that width)."""
    T, H, F, G = (64, 256, 512, 512) if small else (8192, 4096, 14336, 16384)
    return [
        _tile_case("swiglu", f"SwiGLU {T}x{F}", swiglu, [(T, 2, F)], 3, 5),
        _tile_case("swiglu", f"bias-SwiGLU {T}x{F}", swiglu, [(T, 2, F), (2, F)], 3, 5),
        _tile_case("gelu", f"bias-GELU {T}x{G}", gelu, [(T, G), (G,)], 2, 3),
        _norm_case("rms_norm", "RMSNorm", rms_norm, T, H, 1, 1),
        _norm_case("layer_norm", "LayerNorm", layer_norm, T, H, 1, 2),
        _norm_case("add_rms_norm", "add + RMSNorm", add_rms_norm, T, H, 2, 1),
        _norm_case("add_layer_norm", "add + LayerNorm", add_layer_norm, T, H, 2, 2),
        _tile_case(
            "bias_dropout_add", f"bias + dropout + add {T}x{H}", _drop, [(T, H), (T, H), (H,)], 3, 2
        ),
        *(_rope_case(T, heads, interleaved) for heads in (32, 8) for interleaved in (False, True)),
    ]


def _shapes(*shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, DTYPE) for shape in shapes)


def _moved(elements: int, passes: int) -> Work:
    return Work(elements * passes * DTYPE.dtype.itemsize)


def _tile_case(op, name, run, shapes, forward: int, backward: int) -> Case:
    """`forward`, `backward`: how many arrays of the output's size each pass moves."""
    rows, width = shapes[0][0], shapes[0][-1]
    peer = name.rsplit(" ", 1)[0]
    return Case(
        op,
        name,
        run,
        _shapes(*shapes),
        shape_class(DTYPE, width),
        _moved(rows * width, forward),
        _moved(rows * width, forward + backward),
        implementations=("xla", "mosaic") if op == "gelu" else ("xla", "mosaic", "triton"),
        blocks=TILES + IN_REGISTERS if name.startswith("SwiGLU") else TILES,
        differentiable=_without_residual(len(shapes)) if op == "bias_dropout_add" else (),
        peer=peer,
        peer_sizes=(rows, width),
    )


def _drop(x, residual, bias, **options):
    return bias_dropout_add(x, bias, residual, 0.1, jax.random.key(0), **options)


def _norm_case(op, name, norm, T: int, H: int, inputs: int, weights: int) -> Case:
    """RMSNorm reads and writes once, and back reads two and writes one; with the addition one more
    is read and written, and back one more read."""

    def run(*arguments, **options):
        return norm(*arguments, 1e-5, **options)

    forward, backward = 2 * inputs, 2 + inputs
    return Case(
        op,
        f"{name} {T}x{H}",
        run,
        _shapes(*[(T, H)] * inputs, *[(H,)] * weights),
        shape_class(DTYPE, H),
        _moved(T * H, forward),
        _moved(T * H, forward + backward),
        blocks=ROWS,
        differentiable=_without_residual(inputs + weights) if inputs == 2 else (),
        peer=name,
        peer_sizes=(T, H),
    )


def _without_residual(number: int) -> tuple[int, ...]:
    """Its gradient, argument 1, is an array that is there already: to return it too is a copy."""
    return tuple(i for i in range(number) if i != 1)


def _rope_case(T: int, heads: int, interleaved: bool) -> Case:
    D = 128
    pairs = "neighbours" if interleaved else "halves"

    def run(x, cos, sin, **options):
        return apply_rope(x, (cos, sin), interleaved=interleaved, **options)

    table = jax.ShapeDtypeStruct((1, T, D // 2), jnp.float32)
    table_bytes = 2 * T * (D // 2) * 4
    one_pass = _moved(T * heads * D, 2).bytes + table_bytes
    return Case(
        "rope",
        f"RoPE {pairs} {T}x{heads}x{D}",
        run,
        (*_shapes((1, T, heads, D)), table, table),
        shape_class(DTYPE, D),
        Work(one_pass),
        Work(2 * one_pass),
        differentiable=(0,),
        blocks=TURNS,
        peer=None if interleaved else "RoPE",
        peer_sizes=(T, heads, D),
    )
