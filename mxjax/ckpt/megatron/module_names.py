"""Names and order of parameters within Megatron's modules, which its ``torch`` format has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mxjax.ckpt.megatron.exported import Exported

_ORDER = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "decoder.layers",
    "decoder.final_layernorm",
    "mtp.layers",
    "output_layer",
)
_WITHIN_LAYER = (
    "enorm",
    "hnorm",
    "eh_proj",
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "final_layernorm",
)
_NAME = re.compile(
    r"(?P<top>embedding\.\w+|decoder\.layers|decoder\.final_layernorm|mtp\.layers|output_layer)"
    r"(?:\.(?P<layer>\d+))?\.(?:(?:mtp_model|transformer)_layer\.)?(?P<rest>.+)"
)
_KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "expert_bias")


@dataclass(frozen=True)
class Spelling:
    """Which modules of Megatron the names are of.

    Attributes:
      local: Megatron's own, not those of Transformer Engine. The latter's norms are part of the
        linear module that follows, except before MLA's projections and before experts.
      mtp_module: the layer within multi-token prediction: ``mtp_model_layer``, up to 0.16
        ``transformer_layer``.
    """

    local: bool
    mtp_module: str

    def name(self, tensor: Exported, layer: int | None, expert: int | None) -> str:
        """What the module that holds the tensor calls it.

        Args:
          layer: its number within the chunk.
          expert: its number within the rank.
        """
        theirs = tensor.theirs
        name = theirs.names[0]
        fused = [other for other in theirs.names if ".layer_norm_" in other]
        if fused and not self.local and _is_fused(tensor):
            name = fused[0]
        if self.local:
            name = name.replace("experts.{expert}.", f"experts.local_experts.{expert}.")
        else:
            name = re.sub(r"experts\.\{expert\}\.(.+)", rf"experts.\g<1>{expert}", name)
        prefix = tensor.place.section.prefix.replace("{layer}", str(layer))
        return (prefix + name).replace(".transformer_layer.", f".{self.mtp_module}.")


def _is_fused(tensor: Exported) -> bool:
    rules = tensor.place.section.rules
    name = tensor.theirs.names[0]
    latent = any("linear_kv_down_proj" in t.names[0] for rule in rules for t in rule.theirs)
    sparse = any(rule.experts for rule in rules)
    return not (("input_layernorm" in name and latent) or ("pre_mlp_layernorm" in name and sparse))


def registration_order(name: str) -> tuple:
    """Sorts names of a chunk as Megatron registers parameters and buffers."""
    found = _NAME.fullmatch(name)
    top, rest = found["top"], found["rest"]
    layer = int(found["layer"] or 0)
    if top not in ("decoder.layers", "mtp.layers"):
        return _ORDER.index(top), layer, _KINDS.index(rest)
    within = next(i for i, module in enumerate(_WITHIN_LAYER) if rest.startswith(f"{module}."))
    experts = re.fullmatch(
        r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)", rest
    )
    if experts:
        order = (int(experts[1] or 0), experts[2], int(experts[3] or 0))
    elif rest.startswith("mlp.shared_experts."):
        order = (0, rest, 0)
    else:
        order = (0, "", _KINDS.index(rest.rpartition(".")[2]))
    return _ORDER.index(top), layer, within, order
