"""Figures: metrics that parts of the engine report on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric that a part of the engine reports. `name` lacks the prefix `fumehood_` and the
    suffix `_total`.
    """

    name: str
    help: str
    value: float | Mapping[str, float]
    """The metric's value. If the metric has a label, this maps each value of the label to a value
    of the metric."""
    label: str | None = None
    kind: Literal["gauge", "counter"] = "gauge"
