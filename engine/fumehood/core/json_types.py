"""Types of JSON whose structure the engine does not define."""

from __future__ import annotations

from typing import Any

JsonValue = Any
"""Any JSON value; its structure belongs to a tool."""

JsonObject = dict[str, Any]
"""A JSON object with keys that a tool defines."""
