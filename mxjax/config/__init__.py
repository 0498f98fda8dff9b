"""The configuration of a run: its tree (``schema``), its ``rules``, and reading it (``load``)."""

from mxjax.config.checks import Problem, resolve_axes
from mxjax.config.load import ConfigError, load_config, load_settings, to_yaml
from mxjax.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    RematConfig,
    RopeScalingConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "Problem",
    "RematConfig",
    "RopeScalingConfig",
    "TrainingConfig",
    "load_config",
    "load_settings",
    "resolve_axes",
    "to_yaml",
]
