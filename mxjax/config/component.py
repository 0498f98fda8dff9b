"""What every part of the configuration tree is made with."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_SETTINGS = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
AxisSize = Annotated[int, Field(ge=-1)]
VirtualDevices = Annotated[int, Field(ge=0, le=4096)]  # which take JAX 8 s to set up


def component(cls):
    """A frozen dataclass that validates its field types and refuses unknown keys."""
    return dataclass(frozen=True, kw_only=True, config=_SETTINGS)(cls)
