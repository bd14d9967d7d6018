"""A process that spends from a budget and prints its actions until it is killed.

`python -m support.spending DATABASE SEED`: several calls at once. A line `run ID EXPECTED` is
printed when a call may act, a line `end ID TAKEN` when it has, `refused` when one may not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fumehood.budgets.ledger import Budgets
from fumehood.budgets.settings import BudgetRule, Period
from fumehood.budgets.store import CounterTable
from fumehood.core.errors import QuotaExceeded
from fumehood.storage.database import open_database

from .budgets import HandClock, spender, takes
from .preloaded import PYTHON

LIMIT = 20_000
RULE = BudgetRule(name="all", period=Period.TOTAL, tokens=LIMIT)
CALLS_AT_ONCE = 6
MOST_EXPECTED = 60
LIFETIME_S = 60
"""Maximum lifetime of a spender that is not killed, in seconds."""


async def spend_until_killed(path: Path, seed: int) -> None:
    budgets = Budgets([RULE], CounterTable(open_database(path)), HandClock())
    chance = random.Random(seed)
    ids = itertools.count()

    async def calls() -> None:
        while True:
            expected = chance.randint(1, MOST_EXPECTED)
            try:
                held = await budgets.reserve(spender(), takes(tokens=expected))
            except QuotaExceeded:
                _say("refused")
                await asyncio.sleep(0)
                continue
            call = next(ids)
            _say(f"run {call} {expected}")
            await asyncio.sleep(0)
            taken = chance.randint(0, expected)
            _say(f"end {call} {taken}")
            held.settle(takes(tokens=taken))

    async with asyncio.timeout(LIFETIME_S):
        await asyncio.gather(*(calls() for _ in range(CALLS_AT_ONCE)))


@dataclass
class Life:
    """The lines of one process before it was killed."""

    taken: dict[str, int] = field(default_factory=dict)
    """Amount spent per call; a running call counts with its expected amount."""

    refused: int = 0

    def hear(self, line: str) -> None:
        if line == "refused":
            self.refused += 1
            return
        _, call, tokens = line.split()
        self.taken[call] = int(tokens)


def spend(path: Path, seed: int, lines: int, environment: dict[str, str]) -> Life:
    """Start a spender and kill it once it has printed this many lines."""
    life = Life()
    with subprocess.Popen(
        [PYTHON, "-m", "support.spending", str(path), str(seed)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in itertools.islice(process.stdout, lines):
            life.hear(line.strip())
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            if line.endswith("\n"):
                life.hear(line.strip())
    return life


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    asyncio.run(spend_until_killed(Path(sys.argv[1]), int(sys.argv[2])))
