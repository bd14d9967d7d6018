"""Run one peer for the comparison: `python worker.py NAME hard|plain [IMAGE]`.

It reads one JSON request a line and answers each with one line. Times are in milliseconds, taken
around the peer's own call.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from peers import PEERS, Answer, Peer, Unable

THREADS = 8
ENOUGH_S = 10
"""A slow peer is measured for so long, in place of all its rounds."""

BURST_S = 20


class Worker:
    """One peer and its open sessions."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.opened: list[Callable[[str], Answer]] = []

    def about(self) -> Any:
        return {"version": self.peer.version(), "pid": os.getpid()}

    def run(self, code: str) -> Any:
        return _told(self.peer.run, code)

    def times(self, code: str, count: int, wanted: str) -> Any:
        """Run a program often, each for a call of its own. Every answer must be the wanted one."""
        return _times(self.peer.run, code, count, wanted)

    def burst(self, code: str, count: int, wanted: str) -> Any:
        """Return the time of all. A slow peer does some of them, and the time is scaled."""
        begun = time.perf_counter()

        def one(_: int) -> int:
            if time.perf_counter() - begun > BURST_S:
                return 0
            _timed(self.peer.run, code, wanted)
            return 1

        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(one, range(count)))
        return (time.perf_counter() - begun) * 1000 * count / done

    def sessions(self, count: int, code: str) -> Any:
        for _ in range(count):
            self.opened.append(self.peer.session())
            self.opened[-1](code)
        return len(self.opened)

    def session_times(self, code: str, count: int, wanted: str) -> Any:
        return _times(self.opened[0], code, count, wanted)

    def session_run(self, code: str) -> Any:
        return _told(self.opened[0], code)

    def end_sessions(self) -> Any:
        self.opened.clear()
        self.peer.end_sessions()
        return True


def _times(run: Callable[[str], Answer], code: str, count: int, wanted: str) -> list[float]:
    took: list[float] = []
    begun = time.monotonic()
    while len(took) < count and (not took or time.monotonic() - begun < ENOUGH_S):
        took.append(_timed(run, code, wanted))
    return took


def _told(run: Callable[[str], Answer], code: str) -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = run(code)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "out": answer.out[:100_000], "bytes": len(answer.out), "said": answer.said[:200],
        "grown_mb": grown / 1024,
    }  # fmt: skip


def _timed(run: Callable[[str], Answer], code: str, wanted: str) -> float:
    begun = time.perf_counter()
    answer = run(code)
    took = (time.perf_counter() - begun) * 1000
    if answer.out.strip() != wanted:
        raise Unable(answer.said or f"it gave {len(answer.out)} characters of {len(wanted)}")
    return took


def main() -> None:
    """Serve until the input ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    name, kind, *image = sys.argv[1:]
    peer = PEERS[name](kind == "hard", *image)
    worker = Worker(peer)

    def answer(**told: Any) -> None:
        channel.write(json.dumps(told) + "\n")
        channel.flush()

    try:
        peer.start()
        answer(ok=worker.about())
    except Exception as error:
        with suppress(Exception):  # it has begun in part
            peer.stop()
        answer(unable=f"{type(error).__name__}: {error}"[:300])
        return
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer(ok=getattr(worker, asked.pop("do"))(**asked))
            except Unable as error:
                answer(unable=str(error)[:300])
            except Exception as error:
                answer(unable=f"{type(error).__name__}: {error}"[:300])
    finally:
        peer.end_sessions()
        peer.stop()


main()
