"""Types of JSON whose structure the engine does not define, and of values that JSON lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JsonValue = Any
"""Any JSON value; its structure belongs to a tool."""

JsonObject = dict[str, Any]
"""A JSON object with keys that a tool defines."""


@dataclass(frozen=True, slots=True)
class Written:
    """Notes on a model's field that a program may write it as a value of another type."""

    kind: Any
