"""The image with NumPy, pandas and Matplotlib, and sessions: what they cost beside a bare call.

All requests are made in turn (A B A B …) to one daemon, whose Python image is `python-data`. Calls
are paced a little, so that the next child is ready when one comes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

from benchmarks.bench_containers import supervisors
from benchmarks.bench_daemon import MB, Running, bare_client
from benchmarks.line import Line
from fumehood.client import Client

PATH = "/v1/tools/run_python/call"
EMPTY = "0"
GROUP = """\
import numpy as np
import pandas as pd
table = pd.DataFrame({"key": np.arange(10_000) % 7, "value": np.arange(10_000.0)})
float(table.groupby("key")["value"].mean().sum())
"""
GROUPED = 34996.5
ROUNDS = 60
WARM_UP = 10
PACE_S = 0.05
IDLE_MB = 140


def workshop_lines(daemon: Running) -> Iterator[Line]:
    """Every target of the workshop but those of streams."""
    empty, group = call(daemon, EMPTY), call(daemon, GROUP)
    for _ in range(WARM_UP):
        check(empty(), 0)
        check(group(), GROUPED)
    yield from idle(daemon)
    yield from tables(empty, group)
    yield session(daemon, empty)


def call(daemon: Running, code: str, session_id: str | None = None) -> Callable[[], bytes]:
    options = {} if session_id is None else {"session_id": session_id}
    body = json.dumps({"arguments": {"code": code}, "options": options}).encode()
    return bare_client(daemon.socket, PATH, body)


def tables(empty: Callable[[], bytes], group: Callable[[], bytes]) -> Iterator[Line]:
    """A group-by against an empty program, and against the same by `docker run`."""
    empty_ms, group_ms = in_turn(lambda: check(empty(), 0), lambda: check(group(), GROUPED))
    ratio = group_ms / empty_ms
    yield Line(
        f"pandas groups 10 000 rows / an empty program, paced by {PACE_S * 1e3:.0f} ms",
        "≤ 2.5", f"{ratio:.2f} ({group_ms:.1f} ms / {empty_ms:.1f} ms)", ratio <= 2.5,
    )  # fmt: skip
    for network, target in (((), 50), (("--network=none",), None)):
        taken = [timed_ms(lambda network=network: by_docker(*network)) for _ in range(ROUNDS // 10)]
        docker_ms = statistics.median(taken)
        times = docker_ms / group_ms
        yield Line(
            f"the same by docker run --rm {' '.join(network)}".rstrip() + " / the same here",
            f"≥ {target}" if target else "–",
            f"{times:.0f} ({docker_ms:.0f} ms / {group_ms:.1f} ms)",
            times >= target if target else None,
        )


def by_docker(*network: str) -> None:
    """As somebody would who has the same image and no engine."""
    done = subprocess.run(
        ["docker", "run", "--pull=never", "--rm", *network, "--entrypoint=/usr/bin/python3",
         "--env=PYTHONPATH=/opt/fumehood/site", "fumehood/python-data:latest",
         "-c", f"{GROUP.rstrip().rpartition(chr(10))[0]}\nprint({GROUP.splitlines()[-1]})"],
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    if done.stdout.strip() != str(GROUPED).encode():
        raise RuntimeError(f"wrong answer: {done.stdout[:200]!r}")


def session(daemon: Running, empty: Callable[[], bytes]) -> Line:
    """A call of a session that has variables, against one that keeps nothing."""
    made = json.loads(bare_client(daemon.socket, "/v1/sessions", b"{}")())
    identifier = made["data"]["session"]["id"]
    check(call(daemon, "n = 0\nn", identifier)(), 0)
    again = call(daemon, "n", identifier)
    for _ in range(WARM_UP):
        check(again(), 0)
    stateless_ms, session_ms = in_turn(lambda: check(empty(), 0), lambda: check(again(), 0))
    with Client(daemon.socket) as client:
        client.end_session(identifier)  # a stopped daemon leaves it to the next one
    ratio = session_ms / stateless_ms
    return Line(
        "second call of a session / a call that keeps nothing",
        "≤ 1.5", f"{ratio:.2f} ({session_ms:.1f} ms / {stateless_ms:.1f} ms)", ratio <= 1.5,
    )  # fmt: skip


def idle(daemon: Running) -> Iterator[Line]:
    """What a container has in memory that waits, shared pages counted once."""
    time.sleep(1)
    supervisor = max(supervisors(), key=lambda one: one.create_time())
    everyone = [supervisor, *supervisor.children(recursive=True)]
    maps = [process.memory_full_info() for process in everyone]
    total = sum(one.pss for one in maps) / MB
    yield Line(
        "idle container with both zygotes, PSS",
        f"≤ {IDLE_MB} MB",
        f"{total:.0f} MB",
        total <= IDLE_MB,
    )
    spare = min(maps[1:], key=lambda one: one.uss)
    shared = 1 - spare.uss / spare.rss
    yield Line(
        "of a waiting child's memory, shared with the others",
        "–", f"{shared:.0%} of {spare.rss / MB:.0f} MB", None,
    )  # fmt: skip


def in_turn(one: Callable[[], None], other: Callable[[], None]) -> tuple[float, float]:
    """Medians of both, in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for what, taken in zip((one, other), times, strict=True):
            taken.append(timed_ms(what))
            time.sleep(PACE_S)
    return statistics.median(times[0]), statistics.median(times[1])


def timed_ms(what: Callable[[], None]) -> float:
    before = time.perf_counter()
    what()
    return (time.perf_counter() - before) * 1e3


def check(answer: bytes, value: float) -> None:
    """A benchmark of refusals would be fast, and worthless."""
    data = json.loads(answer)["data"]
    if data.get("value") != value:
        raise RuntimeError(f"wrong answer: {answer[:300]!r}")
