"""Base classes of plain values: frozen, and without unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MASKED_URL = "masked URL"
"""Annotates a setting whose URL may end in a secret. `config show` shows only the host."""


class Value(BaseModel):
    """A frozen value. Unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class StrictValue(Value):
    """A value whose fields are never converted from another type."""

    model_config = ConfigDict(strict=True)
