"""All rules between fields of a configuration; importing a module here registers its rules."""

from mxjax.config.rules import data, model, parallel, pipeline, remat, training  # noqa: F401
from mxjax.config.rules.registry import RULES

__all__ = ["RULES"]
