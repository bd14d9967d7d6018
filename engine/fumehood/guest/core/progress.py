"""Progress reports of a program: a percentage and a short message.

Guest side, used by the supervisor. Invariant: a report is a claim of bounded size and form,
and no number of them occupies the channel.
"""

from __future__ import annotations

import math
from typing import Any

MAX_REPORTS = 1000
"""Reports of one run; later ones are read and dropped."""

MAX_MESSAGE_CHARACTERS = 200
MAX_BYTES = 512 * 1024
"""All reports of one run together, as the child sends them; more is too much output."""


def read(claim: Any) -> dict[str, Any] | None:
    """The report in a child's claim, or None if it is invalid."""
    if not isinstance(claim, dict):
        return None
    percent, message = claim.get("percent"), claim.get("message")
    if isinstance(percent, bool) or not isinstance(percent, int | float):
        return None
    # Of floats only: asked of a whole number that no double holds, `isfinite` raises.
    if not isinstance(message, str) or (isinstance(percent, float) and not math.isfinite(percent)):
        return None
    return {
        "percent": float(min(max(percent, 0.0), 100.0)),
        "message": message[:MAX_MESSAGE_CHARACTERS],
    }
