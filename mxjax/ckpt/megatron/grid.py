"""How Megatron's ranks share out a model: tensor, pipeline and expert parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from mxjax.config import Config


class Rank(NamedTuple):
    """A rank among those that hold different parts of a model; a file of the ``torch`` format."""

    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True)
class Grid:
    """Sizes of Megatron's axes.

    Attributes:
      vpp: virtual chunks of each pipeline stage.
      etp: tensor parallel ranks of experts; None: as `tp`.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tp(self) -> int:
        """`etp` with its default filled in."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Fewest data parallel ranks with which there is a rank for each part of the experts."""
        parts = self.expert_tp * self.ep
        return parts // gcd(self.tp, parts)

    @property
    def world_size(self) -> int:
        """Number of ranks with the fewest data parallel ones."""
        return self.tp * self.pp * self.dp

    def ranks(self) -> Iterator[Rank]:
        """All ranks whose parts differ. With folded experts only some pairs of tensor and expert
        rank exist: both count through the same ranks of a stage."""
        pairs = {
            (rank % self.tp, rank // self.expert_tp % self.ep) for rank in range(self.tp * self.dp)
        }
        for tensor, expert in sorted(pairs):
            for stage in range(self.pp):
                yield Rank(tensor, stage, expert)

    def folder(self, rank: Rank) -> str:
        """Megatron's name of the folder of a rank."""
        return (
            f"mp_rank_{rank.tensor:02d}"
            + (f"_{rank.stage:03d}" if self.pp > 1 else "")
            + (f"_{rank.expert:03d}" if self.ep > 1 else "")
        )

    def padded_rows(self, rows: int, multiple: int) -> int:
        """Rows of a vocabulary with the padding of this `tp`, to a multiple of `multiple` each."""
        step = multiple * self.tp
        return -(-rows // step) * step

    def problems(self, config: Config, local: bool) -> list[str]:
        """Why a model cannot be laid out on this grid, one line each, with key and value.

        Args:
          local: Megatron's own modules, which cut some matrices that Transformer Engine keeps
            whole.
        """
        found = [
            f"{_flag(axis)} {size} is not a size: it must be 1 or more"
            for axis in ("tp", "pp", "vpp", "ep", "etp")
            if (size := getattr(self, axis)) is not None and size < 1
        ]
        if found:
            return found
        for axis, size, key, value in self._divisions(config, local):
            if value % size:
                found.append(
                    f"{axis} {size} does not divide {key} {value}: choose one of"
                    f" {', '.join(str(n) for n in range(1, value + 1) if value % n == 0)}"
                )
        if self.tp % self.expert_tp:
            found.append(
                f"--etp {self.etp} does not divide --tp {self.tp}: choose a divisor of it, or leave"
                " --etp out"
            )
        if self.ep > 1 and not config.moe.num_experts:
            found.append(f"--ep {self.ep}, but moe.num_experts is 0: leave --ep out")
        if self.vpp > 1 and self.pp == 1:
            found.append(f"--vpp {self.vpp} needs --pp 2 or more")
        return found

    def _divisions(self, config: Config, local: bool) -> Iterator[tuple[str, int, str, int]]:
        """Axis, its size, and key and value of what it must divide."""
        model, moe = config.model, config.moe
        tp = {"model.num_attention_heads": model.num_attention_heads}
        if moe.first_k_dense or not moe.num_experts:
            tp["model.ffn_hidden_size"] = model.ffn_hidden_size
        if model.mla is None:
            tp["model.num_query_groups"] = model.attention_groups
        elif local:
            if model.mla.q_lora_rank:
                tp["model.mla.q_lora_rank"] = model.mla.q_lora_rank
            width = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
            tp["model.mla.kv_lora_rank + qk_rope_head_dim"] = width
        if model.mtp_num_layers:
            tp["model.hidden_size"] = model.hidden_size
        if moe.num_experts and moe.shared_expert_intermediate_size:
            tp["moe.shared_expert_intermediate_size"] = moe.shared_expert_intermediate_size
        for key, value in tp.items():
            yield "--tp", self.tp, key, value
        stages = self.pp * self.vpp
        yield (
            "--pp" if self.vpp == 1 else "--pp times --vpp",
            stages,
            "model.num_layers",
            (model.num_layers),
        )
        if moe.num_experts:
            yield "--ep", self.ep, "moe.num_experts", moe.num_experts
            width = moe.moe_ffn_hidden_size or model.ffn_hidden_size
            yield "--etp", self.expert_tp, "moe.moe_ffn_hidden_size", width


def _flag(axis: str) -> str:
    return f"--{axis}"
