"""The one name for what is truly open: JSON that somebody else defined."""

from __future__ import annotations

from typing import Any

JsonValue = Any
"""Any value that JSON can hold; what is inside belongs to a tool, not to the engine."""

JsonObject = dict[str, Any]
"""A JSON object with keys that a tool defines."""
