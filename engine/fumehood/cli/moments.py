"""Times as people write them on a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from fumehood.cli.exits import ExitCode, fail

AGE = re.compile(r"^(\d{1,6})([smhd])$")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def age(then: datetime, now: datetime) -> str:
    """How long ago, in its largest unit, as `moment` reads it."""
    seconds = max(0, int((now - then).total_seconds()))
    unit = next((unit for unit in "dhm" if seconds >= UNITS_S[unit]), "s")
    return f"{seconds // UNITS_S[unit]}{unit}"


def moment(text: str, now: datetime, option: str = "--since") -> datetime:
    """A time from an age, or from a date and time; without a zone it is this machine's."""
    age = AGE.match(text)
    try:
        if age is not None:
            return now - timedelta(seconds=int(age[1]) * UNITS_S[age[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        fail(
            f"{option} {text[:80]!r} is neither an age (30s, 10m, 1h, 7d) nor a time "
            "(2026-01-31T09:30).",
            ExitCode.USAGE,
        )
