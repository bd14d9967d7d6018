"""What every benchmark yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One target, its figure, and whether it is met; `met` is None for information only."""

    what: str
    target: str
    figure: str
    met: bool | None
