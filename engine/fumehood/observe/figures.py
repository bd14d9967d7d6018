"""Figures: metrics that parts of the engine report on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric that a part of the engine reports. `name` is without `fumehood_` and `_total`."""

    name: str
    help: str
    value: float | Mapping[str, float]
    """The metric's value, or a mapping from each value of `label` to the metric's value for it."""
    label: str | None = None
    kind: Literal["gauge", "counter"] = "gauge"
