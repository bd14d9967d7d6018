"""The function as which attacks run in the jail. Imported there only, by this directory's path."""

from __future__ import annotations

from typing import Any

from fumehood import tool


@tool
def attempt(code: str) -> Any:
    """Run code as a stranger's function would contain it; answer what it calls `out`."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(code, space)  # noqa: S102  # the jail is what is being tried
    return space.get("out")
