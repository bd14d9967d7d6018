"""Types for JSON values whose structure the engine does not define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JsonValue = Any
"""Any JSON value; its structure belongs to a tool."""

JsonObject = dict[str, Any]
"""A JSON object, usually with keys that a tool defines."""


@dataclass(frozen=True, slots=True)
class Written:
    """Annotates a field of a model with the type that the corresponding keyword argument has in
    Python.
    """

    kind: Any
