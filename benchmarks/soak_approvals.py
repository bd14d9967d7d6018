"""Calls that wait for humans, while their engine is killed at random moments again and again.

Callers ask, repeat and take back, approvers say yes, no or something else, some at once; each
death is looked at as `tests/integration/test_crash_approval.py` does it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from support.crash_approvals import Aftermath, lives
from support.crash_points import nursery

KILLS = 200
LIVES_OF_ONE_STATE = 10
"""After so many, another state begins: each look at one takes longer, and each crash may cost a
budget a block of its limit, until nothing is left of it."""

SCENARIO = "support.crash_approvals:play_until_killed"


def report_approvals(chance: random.Random, kills: int = KILLS) -> bool:
    """Kill, look, and print the report's part; whether everything was as promised."""
    found = Aftermath()
    seed = chance.randrange(1_000_000)
    started = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        with nursery(SCENARIO, dict(os.environ)) as kill:
            for first in range(0, kills, LIVES_OF_ONE_STATE):
                count = min(LIVES_OF_ONE_STATE, kills - first)
                part = lives(kill, home / str(first), count, seed, first)
                found.faults += part.faults
                found.seen += part.seen
    finally:
        shutil.rmtree(home, ignore_errors=True)
    seen, seconds = found.seen, time.monotonic() - started
    print("\n## Approvals\n")
    print(
        f"{seen['deaths']} engines killed in {seconds:.0f} s, while humans approved their calls.\n"
    )
    print("| after a death | calls |\n|---|---|")
    print(f"| approved, started after it | {seen['resumed']} |")
    print(f"| started, so interrupted by it | {seen['interrupted']} |")
    print(f"| still waiting | {seen['pending']} |")
    print(f"| known by a key, and unknown | {seen['unknown']} |\n")
    verdicts = {
        "no approval was lost, no call acted twice, none that was refused has acted": (
            not found.faults
        ),
        "every engine was killed": seen["deaths"] == kills,
        "some were killed before a start, and some after": (
            seen["resumed"] > 0 and seen["interrupted"] > 0
        ),
    }
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for fault in found.faults[:10]:
        print(f"- wrong: {fault[:300]}")
    return all(verdicts.values())
