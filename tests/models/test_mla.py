"""Latent attention against the formulas of DeepSeek-V2's paper, token by token in numpy."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config.schema import MLAConfig, ModelConfig, MoEConfig, RopeScalingConfig
from mxjax.models.mla import LatentAttention
from mxjax.models.parts import Part
from mxjax.models.transformer import Transformer

B, S, H, N, P, R, E, LQ, LKV = 2, 12, 16, 4, 6, 4, 5, 10, 8
MODEL = ModelConfig(
    hidden_size=H,
    num_attention_heads=N,
    mla=MLAConfig(
        q_lora_rank=LQ, kv_lora_rank=LKV, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=E
    ),
    rope_scaling=RopeScalingConfig(
        kind="yarn", factor=4.0, original_max_position_embeddings=8, mscale_all_dim=1.0
    ),
    norm_epsilon=1e-6,
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, S, H)).astype(np.float32)
SEGMENTS = np.array([[1] * 7 + [2] * 5, [1] * 4 + [2] * 8], np.int32)
POSITIONS = np.array([[*range(7), *range(5)], [*range(4), *range(8)]], np.int32)
SIDE_BY_SIDE = np.stack([np.arange(R // 2), np.arange(R // 2) + R // 2], axis=1).reshape(-1)
"""Where dim j of a checkpoint's rotary part, with pairs side by side, is here."""


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def rotate(x, position):
    """DeepSeek's code: neighbours are the real and imaginary part of one complex number. Of four
    dims the first pair turns by 1; YaRN divides the 1 / 100 of the second by its factor, 4."""
    turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * np.array([1, 0.01 / 4]))
    return np.stack([turned.real, turned.imag], axis=1).reshape(-1)


def expected(params, q_lora):
    """Equations 37 to 47 of the paper (appendix C), with cos and sin scaled by m(1) / m(1) = 1 and
    scores by m(1)^2 as in its code."""
    w = jax.tree.map(lambda value: value.astype(np.float64), params)
    out = np.zeros((B, S, H))
    for b in range(B):
        queries, keys, values = [], [], []
        for t in range(S):
            h = X[b, t].astype(np.float64)
            c_q = rms(h @ w["q_down"], w["q_norm"]["scale"]) if q_lora else h
            q = np.einsum("l,lnd->nd", c_q, w["q_up" if q_lora else "q"])
            down = h @ w["kv_down"]
            c_kv, k_rope = rms(down[:LKV], w["kv_norm"]["scale"]), down[LKV:][SIDE_BY_SIDE]
            up = np.einsum("l,lnx->nx", c_kv, w["kv_up"])
            k_rope = rotate(k_rope, POSITIONS[b, t])
            q_rope = [rotate(q[n, P:][SIDE_BY_SIDE], POSITIONS[b, t]) for n in range(N)]
            queries.append([[*q[n, :P], *q_rope[n]] for n in range(N)])
            keys.append([[*up[n, :P], *k_rope] for n in range(N)])
            values.append(up[:, P:])
        queries, keys = np.array(queries), np.array(keys)
        m = 0.1 * math.log(4) + 1
        for t in range(S):
            seen = [j for j in range(t + 1) if SEGMENTS[b, j] == SEGMENTS[b, t]]
            for n in range(N):
                scores = np.array([queries[t, n] @ keys[j, n] for j in seen]) * m * m
                probs = np.exp(scores / math.sqrt(P + R))
                probs /= probs.sum()
                mixed = sum(p * values[j][n] for p, j in zip(probs, seen, strict=True))
                out[b, t] += mixed @ w["out"][n]
    return out


@pytest.mark.parametrize("q_lora", [True, False])
def test_equals_the_paper(small_config, mesh_of, q_lora):
    mla = dataclasses.replace(MODEL.mla, q_lora_rank=LQ if q_lora else None)
    model = dataclasses.replace(MODEL, mla=mla)
    part = Part(lambda rngs: LatentAttention(model, rngs))
    params = jax.tree.map(
        lambda info: RNG.normal(size=info.shape).astype(np.float32) * 0.4, part.infos
    )
    context = Transformer(model, MoEConfig()).context
    batch = {"positions": POSITIONS, "segment_ids": SEGMENTS}

    def local(params, x, batch):
        return part.bind(params)(x, context(batch, None), None)

    spec, mesh = PartitionSpec(), mesh_of(small_config("llama"))
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    got = jax.jit(run)(params, X, batch)
    np.testing.assert_allclose(got, expected(params, q_lora), rtol=2e-4, atol=2e-5)
