"""A process that runs a call with an idempotency key and is killed meanwhile.

`python -m support.keyed_crash DATABASE LEDGER POINT`: one call, killed by itself at that point.
A call's effect is a line in the ledger, which outlives the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from fumehood.core.envelope import Envelope
from fumehood.pipeline.claim import Claim, Keys
from fumehood.storage.database import open_database

from .definitions import function_definition
from .keyed import NOW, answer, permitted
from .preloaded import PYTHON

POINTS = ("claimed", "acted", "settled")
ACTING = function_definition(name="act")
REPEATABLE = function_definition(name="act", idempotent=True)
TESTS = Path(__file__).parents[1]


def write(ledger: Path, line: str) -> None:
    """Act: write a line that survives the process."""
    handle = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def lines(ledger: Path) -> list[str]:
    """The lines written so far."""
    return ledger.read_text().splitlines() if ledger.exists() else []


def result(key: str) -> Envelope:
    """The result of the call with this key."""
    return answer(f"call_{key}", {"did": key})


async def one(keys: Keys, ledger: Path, point: str, *, repeatable: bool) -> None:
    """Run one call; the process dies at `point`."""
    call = permitted(tool=REPEATABLE if repeatable else ACTING, idempotency_key="k")
    claim = await keys.claim(call, "call_k", NOW)
    assert isinstance(claim, Claim)
    _die_if(point == "claimed")
    write(ledger, "k")
    _die_if(point == "acted")
    await claim.settle(result("k"), acted=True)
    _die_if(point == "settled")


def _die_if(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


async def _main(database: str, ledger: str, point: str, what: str) -> None:
    keys = Keys(open_database(Path(database)))
    await one(keys, Path(ledger), point, repeatable=what == "repeatable")


def run_to(point: str, home: Path, environment: dict[str, str], *, repeatable: bool) -> None:
    """Run one call in a process that dies at this point."""
    paths = (str(home / "state.db"), str(home / "ledger"))
    what = "repeatable" if repeatable else "acting"
    done = subprocess.run(
        [PYTHON, "-m", "support.keyed_crash", *paths, point, what],
        env=environment, cwd=TESTS, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
