"""What `fumehood doctor` says of one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what is the matter, and how to mend it."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""
