"""Commands that convert plain values (str, int, float, Path) without pydantic.

typer loads pydantic and builds a validator for each parameter, even for plain text, which costs
several times as much as a call. Other values and all errors are left to typer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command that does not load pydantic for plain values."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, including `--help`."""
        return with_plain_values(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for a group and its `--help`."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, including `--help`."""
        return with_plain_values(super().get_params(ctx))


def with_plain_values(parameters: Any) -> Any:
    """Return the same parameters, each with our converter instead of typer's."""
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", parameter) is None:  # typer makes it when needed
            parameter._runtime_param = _PlainValue()
    return parameters


class _PlainValue:
    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a value as typer would."""
        is_many = param.multiple or param.nargs == -1
        if value is None:
            return () if is_many else None
        wanted = param.type_descriptor
        if isinstance(value, str) and not is_many and not wanted.is_ranged:
            if wanted.annotation in (str, int, float):
                with suppress(ValueError):
                    return wanted.annotation(value)
            if wanted.annotation is Path and _is_plain(value):
                return Path(value)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param, ctx)


def _is_plain(path: str) -> bool:
    """Whether a path does not exist or is readable, which is all that typer checks."""
    return not os.path.lexists(path) or os.access(path, os.R_OK)
