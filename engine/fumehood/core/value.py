"""Base classes of plain values: frozen, and without unknown fields."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict

MASKED_URL = "masked URL"
"""Annotates a setting whose URL may end in a secret. `config show` shows only the host."""


class Value(BaseModel):
    """A frozen value. It cannot be created with unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class StrictValue(Value):
    """A value whose fields accept only their own type. Other types are refused, not converted."""

    model_config = ConfigDict(strict=True)


def table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model in `annotation`, the type of a configuration field, or None if the type
    contains no model.

    The type may be the model itself, or an optional model or a list of models.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(table_of, get_args(annotation))), None)
