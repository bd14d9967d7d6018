"""The findings of `fumehood doctor`. The checks that parts add yield findings as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, with a remedy if one is needed."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""
