"""A restricted program through the daemon's socket, beside a bare fork and exec of the same.

The daemon has its default configuration. Back to back means that calls follow each other at
once, in blocks that are made in turn with blocks of the bare server: a call that waits for a
new process shows it. Paced by 50 ms, a process stands ready each time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.bench_daemon import Request, Running, bare_client
from benchmarks.fork_server import bare_fork_server
from benchmarks.line import Line

BLOCKS = 40
BLOCK_CALLS = 20
PACED_CALLS = 100
PAUSE_S = 0.05
WARM_UP = 30
CALL_PATH = "/v1/tools/run_restricted_python/call"
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


def restricted_lines(daemon: Running) -> Iterator[Line]:
    """`run_restricted_python` as users get it, back to back and paced."""
    body = json.dumps({"arguments": {"code": PROGRAM + LAST}}).encode()
    call = bare_client(daemon.socket, CALL_PATH, body)
    bare_code = f"{PROGRAM}value = {LAST}\n"
    with bare_fork_server() as ask:

        def bare() -> bytes:
            return ask(bare_code)

        for _ in range(WARM_UP):
            _check(json.loads(bare()))
            _check(json.loads(call())["data"])
        bare_ms, call_ms = _paired_ms(bare, call, blocks=BLOCKS, calls=BLOCK_CALLS)
        yield _line("back to back", bare_ms, call_ms, target=2)
        bare_ms, call_ms = _paired_ms(
            bare, call, blocks=PACED_CALLS, calls=1, pause=lambda: time.sleep(PAUSE_S)
        )
        yield _line("paced by 50 ms", bare_ms, call_ms, target=None)


def _line(how: str, bare_ms: float, call_ms: float, *, target: float | None) -> Line:
    ratio = call_ms / bare_ms
    return Line(
        f"restricted program through the socket, {how} / bare fork and exec of the same",
        "–" if target is None else f"≤ {target:g}",
        f"{ratio:.2f} ({call_ms:.2f} ms / {bare_ms:.2f} ms)",
        None if target is None else ratio <= target,
    )


def _paired_ms(
    first: Request,
    second: Request,
    *,
    blocks: int,
    calls: int,
    pause: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Medians of two requests in milliseconds, made in blocks in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(blocks):
        for request, taken in zip((first, second), times, strict=True):
            for _ in range(calls):
                pause()
                before = time.perf_counter()
                request()
                taken.append(time.perf_counter() - before)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


def _check(data: dict[str, object]) -> None:
    """A benchmark of wrong answers measures nothing."""
    if data.get("value") != EXPECTED:
        raise RuntimeError(f"wrong answer: {data}")
