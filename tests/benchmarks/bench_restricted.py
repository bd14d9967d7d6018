"""A restricted program beside a bare fork and exec of the same program, in turn."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from fumehood import Config, Engine
from tests.benchmarks.fork_server import bare_fork_server

PAIRS = 400
WARM_UP = 30
PROGRAM = """
words = "the quick brown fox jumps over the lazy dog the end".split()
counts = {}
for word in words:
    counts[word] = counts.get(word, 0) + 1
def weight(pair):
    return (-pair[1], pair[0])
"""
LAST = "sorted(counts.items(), key=weight)[:2]"
EXPECTED = [["the", 3], ["brown", 1]]


def paired_ms() -> tuple[float, float]:
    """Medians of the bare server's and the engine's time, in milliseconds."""
    return asyncio.run(_measure())


async def _measure() -> tuple[float, float]:
    bare_code, restricted_code = f"{PROGRAM}value = {LAST}\n", PROGRAM + LAST
    bare: list[float] = []
    restricted: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="fh-", dir="/tmp") as home,
        bare_fork_server() as ask,
    ):
        async with Engine(config=Config(home=Path(home))) as engine:
            for _ in range(WARM_UP + PAIRS):
                before = time.perf_counter()
                answer = json.loads(ask(bare_code))
                between = time.perf_counter()
                envelope = await engine.call("run_restricted_python", {"code": restricted_code})
                after = time.perf_counter()
                if not answer["value"] == EXPECTED == envelope.data.get("value"):
                    raise RuntimeError(f"wrong answer: {answer} {envelope.error}")
                bare.append(between - before)
                restricted.append(after - between)
    return (
        statistics.median(bare[WARM_UP:]) * 1e3,
        statistics.median(restricted[WARM_UP:]) * 1e3,
    )
