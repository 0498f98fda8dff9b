"""Megatron's optimizer and scheduler apart from the moments: groups, counts, rates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxjax.config import Config
from mxjax.training.optimizer import learning_rate


@dataclass(frozen=True)
class ScheduleSteps:
    """Our schedule of the learning rate in Megatron's terms; the reverse of `schedule`.

    Attributes:
      style: Megatron's ``lr_decay_style``.
      warmup: steps of the warm-up.
      decay: step at which the lowest rate is reached.
      wsd: length of the final decay of ``WSD``; None: of another style.
    """

    style: str
    warmup: int
    decay: int
    wsd: int | None = None

    @classmethod
    def of(cls, config: Config) -> ScheduleSteps:
        """Those of a configuration."""
        optimizer, steps = config.optimizer, config.training.num_steps
        warmup = optimizer.warmup_steps
        if optimizer.schedule == "wsd":
            return cls("WSD", warmup, steps, optimizer.decay_steps or max(1, steps // 10))
        return cls(optimizer.schedule, warmup, optimizer.decay_steps or steps)


@dataclass(frozen=True)
class AdamState:
    """What all parameters share.

    Attributes:
      count: updates that Adam has made.
      iteration: steps of the run, skipped ones included.
    """

    config: Config
    count: int
    iteration: int

    @functools.cached_property
    def rate(self) -> float:
        """The learning rate of the next step."""
        schedule = learning_rate(self.config.optimizer, self.config.training.num_steps)
        return float(schedule(self.iteration))

    @property
    def step(self) -> np.ndarray:
        """The count as torch's Adam keeps it for each parameter."""
        return np.asarray(self.count, np.float32)

    def groups(self, experts: bool) -> list[dict[str, Any]]:
        """Parameter groups: with weight decay and without, which is what has one dim.

        Megatron tells groups apart by the values of ``wd_mult``, ``lr_mult``, ``max_lr``,
        ``min_lr``, ``is_expert_parallel`` and ``is_decoupled_lr``. The rest is what AdamW of
        torch and of Transformer Engine want to find.

        Args:
          experts: the parameters of experts on more than one ``ep`` rank, which all have two dims.
        """
        optimizer = self.config.optimizer
        return [
            {
                "is_expert_parallel": experts,
                "default_config": True,
                "wd_mult": decay,
                "lr_mult": 1.0,
                "is_decoupled_lr": False,
                "max_lr": optimizer.lr,
                "min_lr": optimizer.min_lr,
                "lr": self.rate,
                "betas": (optimizer.beta1, optimizer.beta2),
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay * decay,
                "bias_correction": True,
                "step": self.count,
                "amsgrad": False,
                "maximize": False,
                "foreach": None,
                "capturable": False,
                "differentiable": False,
                "fused": None,
                "decoupled_weight_decay": True,
            }
            for decay in ([1.0] if experts else [1.0, 0.0])
        ]

    def common(self, expert_parallel: bool) -> dict[Any, Any]:
        """What ``torch_dist`` keeps beside the tensors.

        Megatron's optimizers (plain fp32, plain with fp32 copies, distributed) each look at other
        keys; all of them are here.

        Args:
          expert_parallel: experts are on more than one rank, and have an optimizer of their own.
        """
        if not expert_parallel:
            return self._common(experts=False)
        return {0: self._common(experts=False), 1: self._common(experts=True)}

    def _common(self, experts: bool) -> dict[str, Any]:
        inner = {"param_groups": self.groups(experts), "state": {"common_step": self.step}}
        return {
            "optimizer": inner,
            "param_groups": self.groups(experts),
            "state": {"common_step": self.step},
            "param_state_sharding_type": "fully_reshardable",
        }

    def scheduler(self) -> dict[str, Any]:
        """The state of Megatron's ``OptimizerParamScheduler``, which counts samples.

        Its first rate is that of 0 samples, ours that of one step: it goes on with ours because
        it is told of one step more than the run has done.
        """
        config, optimizer = self.config, self.config.optimizer
        batch, steps = config.training.global_batch_size, config.training.num_steps
        schedule = ScheduleSteps.of(config)
        return {
            "max_lr": optimizer.lr,
            "min_lr": optimizer.min_lr,
            "lr_warmup_steps": schedule.warmup * batch,
            "num_steps": (self.iteration + 1) * batch,
            "lr_decay_style": schedule.style,
            "lr_decay_steps": schedule.decay * batch,
            "start_wd": optimizer.weight_decay,
            "end_wd": optimizer.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": steps * batch,
        }
