"""The function that runs attacks in the jail. Only the jail imports this module, with this
directory as its import path.
"""

from __future__ import annotations

from typing import Any

from fumehood import tool


@tool
def attempt(code: str) -> Any:
    """Run untrusted code; return its variable `out`."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(code, space)  # noqa: S102  # the jail is under test
    return space.get("out")
