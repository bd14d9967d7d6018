"""The crash harness, many times: a writer of the state is killed at random moments.

One database for all lives: every row that any of them acknowledged has to be there after
each death. A quarter of the deaths comes early, while the database is made or opened. Then the
tests that kill an engine at every commit run once more with the state in PostgreSQL, and those that
the test run leaves to the soak test.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.crashing import crash, examine

KILLS = 200
MOST_ROWS = 1500
EARLY_S = 0.6
LIVES_OF_ONE_DATABASE = 25
"""After so many, another one begins, so that beginnings are hit too."""


def report_crashes(chance: random.Random) -> bool:
    """Kill, examine, and print the report's second part; whether nothing was lost."""
    faults: list[str] = []
    acknowledged = early = 0
    started = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        promised: set[str] = set()
        for life in range(KILLS):
            if life % LIVES_OF_ONE_DATABASE == 0:
                promised = set()
            path = home / f"{life // LIVES_OF_ONE_DATABASE}.db"
            is_early = chance.random() < 0.25
            early += is_early
            rows = 0 if is_early else chance.randrange(1, MOST_ROWS)
            wait_s = chance.uniform(0, EARLY_S) if is_early else 0.0
            new = crash(path, life, rows, dict(os.environ), lambda s=wait_s: time.sleep(s))
            acknowledged += len(new)
            promised |= new
            fault = examine(path, promised)
            if fault is not None:
                faults.append(f"life {life}: {fault}")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print("\n## Crashes\n")
    print(
        f"{KILLS} writers of the state killed in {time.monotonic() - started:.0f} s, {early} of "
        f"them while they opened it; {acknowledged} rows were acknowledged before.\n"
    )
    print(f"- {'FAILED' if faults else 'ok'}: every acknowledged row is there, the file is sound")
    for fault in faults[:10]:
        print(f"- lost: {fault}")
    return not faults and acknowledged > KILLS


EVERY_COMMIT = (
    "tests/integration/test_crash_approval.py",
    "tests/integration/test_crash_decisions.py",
    "tests/integration/test_audit_crashes.py",
    "tests/integration/test_budgets.py",
)


def report_every_commit() -> bool:
    """Kill engines at every commit of their scenarios, on PostgreSQL; whether all tests passed."""
    return report_tests(
        "Every commit, on PostgreSQL",
        "engines that are killed around each commit lose and repeat nothing",
        "--soak", "--state=postgresql", *EVERY_COMMIT,
    )  # fmt: skip


def report_left_to_soak() -> bool:
    """Run the tests that the test run leaves out; whether all passed."""
    return report_tests(
        "Tests of the soak alone", "every test that the test run leaves out has passed",
        "--soak", "-m", "soak", "tests",
    )  # fmt: skip


def report_tests(title: str, promise: str, *arguments: str) -> bool:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout.strip().splitlines() or ["nothing was said"]
    print(f"\n## {title}\n")
    print(f"{said[-1]}; with their start {time.monotonic() - started:.0f} s.\n")
    verdict = "FAILED" if done.returncode else "ok"
    print(f"- {verdict}: {promise}")
    for line in said:
        if line.startswith("FAILED"):
            print(f"- wrong: {line[:300]}")
    return done.returncode == 0
