"""A process that writes rows and prints the acknowledged ones until it is killed.

`python -m support.crashing DATABASE SEED`: several writers at once; each durable row is
printed after its write has returned. Posted rows are interleaved, without any acknowledgement.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import func, select

from fumehood.storage.calls import CallLog
from fumehood.storage.database import open_database
from fumehood.storage.schema import CALLS

from .preloaded import PYTHON
from .state import call_row, keys, put

WRITERS = 4
LIFETIME_S = 60
"""Maximum lifetime of a writer that is not killed, in seconds."""


async def write_until_killed(path: Path, seed: int) -> None:
    database = open_database(path)
    log = CallLog(database, kept_days=30, kept=100)
    chance = random.Random(seed)

    async def one(writer: int) -> None:
        for number in itertools.count():
            key = f"{seed}-{writer}-{number}"
            log.record(call_row(chance.getrandbits(90)))
            await database.write(put(key, "x" * chance.randrange(3000)))
            os.write(1, f"{key}\n".encode())

    async with asyncio.timeout(LIFETIME_S):
        await asyncio.gather(*(one(writer) for writer in range(WRITERS)))


def crash(
    path: Path,
    seed: int,
    lines: int,
    environment: dict[str, str],
    pause: Callable[[], None] = lambda: None,
) -> set[str]:
    """Start a writer and kill it once it has acknowledged this many rows.

    Returns every acknowledged row, including those written before the signal arrived.
    """
    with subprocess.Popen(
        [PYTHON, "-m", "support.crashing", str(path), str(seed)],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=Path(__file__).parents[1],
    ) as process:
        heard = [process.stdout.readline() for _ in range(lines)]
        pause()
        process.send_signal(signal.SIGKILL)
        heard += process.stdout.readlines()
    return {line.decode().strip() for line in heard if line.endswith(b"\n")}


def examine(path: Path, acknowledged: set[str]) -> str | None:
    """Open the database that is left; return its fault, or None."""
    database = open_database(path)
    try:
        missing = acknowledged - database.read_now(keys)
        if missing:
            return f"{len(missing)} acknowledged rows are missing"
        found = database.read_now(
            lambda c: c.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
        )
        if found != "ok":
            return f"the database is not sound: {found}"
        database.read_now(lambda c: c.execute(select(func.count()).select_from(CALLS)).scalar_one())
        database.write_now(put(f"after-{os.urandom(8).hex()}"))
    finally:
        database.close()
    return None


if __name__ == "__main__":
    asyncio.run(write_until_killed(Path(sys.argv[1]), int(sys.argv[2])))
