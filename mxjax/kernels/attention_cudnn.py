"""Attention by cuDNN, through JAX: output and log-sum-exp, and the gradient, which needs both.

Not through JAX's derivative of it: what that keeps has no names for recompute policies and may be
wider than the output, and it cannot take the log-sum-exp of rows of which a block is but a part.

Shapes: B batch, Q queries, K keys, N query heads, G key/value heads (N a multiple of G), D width of
query and key heads, E width of value heads, at most D. A mask, bool [B, Q, K], says which keys a
query sees; None: all.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from mxjax.kernels.implementation import mosaic_kernel, plans

_NARROW_VALUES = 91000
"""First version of cuDNN (9.10) that takes values narrower than keys."""


@dataclass(frozen=True)
class CudnnCall:
    """What calls of cuDNN have in common.

    Attributes:
      scale: multiplies the scores.
      causal: a query sees only keys with an index up to its own.
      stand_in: kernels of the same sizes that do nothing take cuDNN's place: for plans, from
        programs that are compiled where cuDNN is not, and never run.
    """

    scale: float
    causal: bool
    stand_in: bool = False

    @property
    def mask_type(self) -> cudnn.MaskType:
        return cudnn.MaskType.CAUSAL if self.causal else cudnn.MaskType.NO_MASK


def cudnn_obstacle(
    q_BQND: jax.Array, k_BKGD: jax.Array, v_BKGE: jax.Array, *, documents: bool, dropout: bool
) -> str | None:
    """Why cuDNN cannot run this call, here or where it is planned for; None: it can."""
    if plans.get() == "no" and jax.default_backend() != "gpu":
        return "no NVIDIA GPU"
    if q_BQND.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in 16 bits, not {q_BQND.dtype}"
    D, E = q_BQND.shape[-1], v_BKGE.shape[-1]
    if D % 8 or D > 256:
        return f"head_dim {D} is not a multiple of 8 up to 256"
    if E > D:
        return f"its values would be wider ({E}) than its keys ({D})"
    if documents and (q_BQND.shape[1] % 2 or k_BKGD.shape[1] % 2):
        return "with document masks it needs an even number of queries and keys in a block"
    return "it applies no attention dropout" if dropout else None


def cudnn_forward(
    q_BQND: jax.Array,
    k_BKGD: jax.Array,
    v_BKGE: jax.Array,
    mask_BQK: jax.Array | None,
    call: CudnnCall,
    *,
    with_lse: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Output [B, Q, N, E] in the dtype of the queries, and log-sum-exp [B, N, Q] in fp32.

    Args:
      with_lse: False, where nothing is differentiated, spares making it.
    """
    v, bias = _operands(q_BQND, v_BKGE, mask_BQK, call)
    forward = _forward_of_plans if call.stand_in else cudnn.dot_product_attention
    options = {"scale": call.scale, "mask_type": call.mask_type, "return_residual": with_lse}
    results = forward(q_BQND, k_BKGD, v, bias, **options)
    out, lse_BNQ = results if with_lse else (results, None)
    return out[..., : v_BKGE.shape[-1]], lse_BNQ


def sees_nothing(lse_BNQ: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Queries to which the mask leaves no key, bool [B, N, Q]: to cuDNN they see all keys, each
    with the same very low score.

    Args:
      lse_BNQ: of `cudnn_forward`.
      dtype: of the queries.
    """
    return lse_BNQ < cudnn.get_large_negative_number(dtype) / 2


def cudnn_gradient(
    q_BQND: jax.Array,
    k_BKGD: jax.Array,
    v_BKGE: jax.Array,
    mask_BQK: jax.Array | None,
    results: tuple[jax.Array, jax.Array, jax.Array],
    call: CudnnCall,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values, in their dtypes.

    Args:
      results: output and log-sum-exp of the whole rows, of which these keys may be a part, and the
        gradient of the output.
    """
    v, bias = _operands(q_BQND, v_BKGE, mask_BQK, call)
    out, lse_BNQ, d_out = results
    out, d_out = (_widened(x.astype(q_BQND.dtype), v.shape[-1]) for x in (out, d_out))
    operands = q_BQND, k_BKGD, v, bias, lse_BNQ, out, d_out
    d_q, d_k, d_v = _gradient_of_plans(*operands) if call.stand_in else _gradient(*operands, call)
    return d_q, d_k, d_v[..., : v_BKGE.shape[-1]]


def _gradient(q, k, v, bias, lse, out, d_out, call: CudnnCall):
    """What JAX's derivative calls."""
    none = jnp.zeros(0, q.dtype)
    # JAX 0.12 wants one more.
    signature = inspect.signature(cudnn.dot_product_attention)
    newer = {"score_mod": None} if "score_mod" in signature.parameters else {}
    return cudnn._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, none if bias is None else bias, *[none] * 6, lse, out, d_out),
        scale=call.scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(bias is not None, False),
        mask_type=call.mask_type,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **newer,
    )


def _operands(q_BQND, v_BKGE, mask_BQK, call: CudnnCall) -> tuple[jax.Array, jax.Array | None]:
    """Values as cuDNN takes them, and the bias that the mask is to it."""
    bias = None
    if mask_BQK is not None:
        bias = cudnn.combine_bias_and_mask(None, mask_BQK[:, None], q_BQND.dtype)
    # Narrow values together with a bias have not been tried on a GPU.
    if bias is None and v_BKGE.shape[-1] % 8 == 0 and _takes_narrow_values(call):
        return v_BKGE, bias
    return _widened(v_BKGE, q_BQND.shape[-1]), bias


def _takes_narrow_values(call: CudnnCall) -> bool:
    if call.stand_in:  # plans are for Hopper or later
        return True
    is_new = cudnn.check_cudnn_version() >= _NARROW_VALUES
    return is_new and cudnn.check_compute_capability("9.0")


def _widened(x: jax.Array, width: int) -> jax.Array:
    """`x` with zeros behind its last dim up to `width`: zeros in, zeros out."""
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


# What has cuDNN's place in plans


def _forward_of_plans(q, k, v, bias, *, return_residual, **_):
    B, Q, N, _ = q.shape
    out = jax.ShapeDtypeStruct((B, Q, N, v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct((B, N, Q), jnp.float32)
    return _nothing((out, lse) if return_residual else out, q, k, v, bias)


def _gradient_of_plans(q, k, v, bias, lse, out, d_out):
    # It adds the gradient of the queries up in fp32.
    scratch = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return _nothing((q, k, v, scratch), q, k, v, bias, lse, out, d_out)[:3]


def _nothing(outs, *operands):
    """Arrays like `outs`, of any content, by a kernel that does nothing."""
    types = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), outs)
    kernel = mosaic_kernel(lambda *_: None, out_type=types, grid=(1,), grid_names=("block",))
    return kernel(*(x for x in operands if x is not None))
