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
    """Annotates a field of a model whose value client methods accept in another type.

    Client methods take the field as a keyword argument. `kind` is the Python type of that argument.
    """

    kind: Any
