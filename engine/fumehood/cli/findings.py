"""What `fumehood doctor` finds. Checks of parts yield it as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing checked: the result, and a remedy if it needs one."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""
