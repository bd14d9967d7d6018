"""The result type of `fumehood doctor`'s checks, including the checks that parts add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `cure` is the remedy, or empty if none is needed."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""
