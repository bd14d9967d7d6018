"""A process that runs calls with idempotency keys and is killed meanwhile.

`python -m support.keyed_crash DATABASE LEDGER POINT`: one call, killed by itself at that point.
`python -m support.keyed_crash DATABASE LEDGER many SEED`: many calls at once, killed at random.
A call's effect is a line in the ledger, which outlives the process; its answer
is a line on standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
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
WORKERS = 4
LIFE_S = (0.05, 0.3)
"""Range of the lifetime of a process with many calls, in seconds."""


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


async def one(keys: Keys, ledger: Path, key: str, point: str = "", *, repeatable: bool) -> None:
    """Run one call; the process dies at `point`."""
    call = permitted(tool=REPEATABLE if repeatable else ACTING, idempotency_key=key)
    claim = await keys.claim(call, f"call_{key}", NOW)
    assert isinstance(claim, Claim)
    _die_if(point == "claimed")
    write(ledger, key)
    _die_if(point == "acted")
    await claim.settle(result(key), acted=True)
    _die_if(point == "settled")
    os.write(1, f"{key}\n".encode())


def _die_if(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


async def _main(database: str, ledger: str, point: str, what: str) -> None:
    keys = Keys(open_database(Path(database)))
    if point != "many":
        await one(keys, Path(ledger), "k", point, repeatable=what == "repeatable")
        return
    life = threading.Timer(random.Random(what).uniform(*LIFE_S), _die_if, [True])
    life.start()

    async def work(worker: int) -> None:
        for number in itertools.count():
            key = f"{what}-{worker}-{number}"
            await one(keys, Path(ledger), key, repeatable=False)

    await asyncio.gather(*(work(worker) for worker in range(WORKERS)))


def run_to(point: str, home: Path, environment: dict[str, str], *, repeatable: bool) -> None:
    """Run one call in a process that dies at this point."""
    what = "repeatable" if repeatable else "acting"
    done = subprocess.run(
        [*_command(home), point, what], env=environment, cwd=TESTS, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL


def killed_at_random(home: Path, seed: int, environment: dict[str, str]) -> list[str]:
    """Run many calls until the process kills itself; return the keys of answered calls."""
    done = subprocess.run(
        [*_command(home), "many", str(seed)],
        env=environment, cwd=TESTS, timeout=60, check=False, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    return [line.strip() for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]


def _command(home: Path) -> list[str]:
    paths = (str(home / "state.db"), str(home / "ledger"))
    return [PYTHON, "-m", "support.keyed_crash", *paths]


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
