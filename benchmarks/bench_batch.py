"""A batch of calculators beside the same calls one by one, both with the product's client."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bench_daemon import Running
from benchmarks.line import Line
from fumehood import Client, Envelope

CALLS = 100
PAIRS = 30
WARM_UP = 3
MEMBERS: list[dict[str, Any]] = [
    {"tool": "calculator", "arguments": {"expression": f"{number} + 2**10"}}
    for number in range(CALLS)
]


def batch_lines(daemon: Running) -> Iterator[Line]:
    """Every line of this file."""
    with Client(daemon.socket) as client:
        kinds: dict[str, Callable[[], list[Envelope]]] = {
            "one by one": lambda: [client.call(m["tool"], m["arguments"]) for m in MEMBERS],
            "batch": lambda: client.batch(MEMBERS),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(WARM_UP + PAIRS):
            for kind, make in kinds.items():
                before = time.perf_counter()
                answers = make()
                if number >= WARM_UP:
                    times[kind].append((time.perf_counter() - before) * 1e3)
                if [a.data.get("value") for a in answers] != [n + 1024 for n in range(CALLS)]:
                    raise RuntimeError("a wrong answer")
    single_ms, batch_ms = (statistics.median(taken) for taken in times.values())
    yield Line(
        f"{CALLS} calculators: one by one / in a batch", "≥ 3",
        f"{single_ms / batch_ms:.2f} ({single_ms:.1f} ms / {batch_ms:.1f} ms)",
        single_ms / batch_ms >= 3,
    )  # fmt: skip
