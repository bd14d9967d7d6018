"""A cluster on this machine: what a remote call costs more, and what four nodes serve."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks.bench_containers import timed
from benchmarks.bench_daemon import MB, SMALLEST_IMAGE, Running, private_bytes, run_daemon
from benchmarks.line import Line
from fumehood.client import Client
from support.ray_cluster import Cluster, running_cluster

CALLS = 300
SLOTS = 4
ROUNDS = 20
"""Calls of each caller, of programs that sleep 200 ms."""

OUTPUT_MB = 300
"""Of which a run's output may have 250."""

SETTINGS = {
    **SMALLEST_IMAGE, "FUMEHOOD_CONTAINER__QUEUE_SECONDS": "60",
    "FUMEHOOD_CONTAINER__OUTPUT_KB": str(1024 * 1024),
}  # fmt: skip


def cluster_lines() -> Iterator[Line]:
    """Ray's processes, its nodes and the engine share this machine's processors."""
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(nodes=1, slots=SLOTS))
        remote = stack.enter_context(run_daemon(on(cluster)))
        local = stack.enter_context(run_daemon(SETTINGS))
        wait_for_nodes(remote, 1)
        wait_for_nodes(local, 0)
        yield remote_over_local(remote, local)
        yield relayed(remote)
        of_one = throughput(remote, 3 * SLOTS // 4)
        for _ in range(3):
            cluster.add(SLOTS)
        wait_for_nodes(remote, 4)
        of_four = throughput(remote, 4 * 3 * SLOTS // 4)
    ratio = of_four / of_one
    yield Line(
        "programs that sleep 200 ms, slots full: 4 nodes / 1 node",
        "≥ 3.6", f"{ratio:.2f} ({of_four:.0f} / {of_one:.0f} calls/s)", ratio >= 3.6,
    )  # fmt: skip


def on(cluster: Cluster) -> Mapping[str, str]:
    """The settings of an engine with this cluster."""
    return {**SETTINGS, **cluster.environment, "FUMEHOOD_CLUSTER__ADDRESS": cluster.address}


def wait_for_nodes(daemon: Running, number: int) -> None:
    """Make calls until so many nodes have served some."""
    seen: set[str] = set()

    def call(_: int) -> str | None:
        with Client(daemon.socket) as client:
            answer = client.call("run_python", {"code": "import time; time.sleep(0.1)"})
            return answer.metadata.sandbox.node if answer.metadata.sandbox is not None else None

    with ThreadPoolExecutor(12) as threads:
        for _ in range(30):
            seen |= {node for node in threads.map(call, range(12)) if node is not None}
            if len(seen) >= number:
                return
    raise RuntimeError(f"only {len(seen)} nodes serve")


def remote_over_local(remote: Running, local: Running) -> Line:
    """In turn, warm."""
    with Client(remote.socket) as there, Client(local.socket) as here:
        there_s, here_s = [], []
        for _ in range(CALLS):
            there_s.append(timed(lambda: there.call("run_python", {"code": "0"})))
            here_s.append(timed(lambda: here.call("run_python", {"code": "0"})))
    there_ms, here_ms = (statistics.median(taken) * 1e3 for taken in (there_s, here_s))
    more_ms = there_ms - here_ms
    return Line(
        "run_python on a node: more than on the engine's machine",
        "≤ 4 ms", f"{more_ms:.1f} ms ({there_ms:.1f} / {here_ms:.1f} ms)", more_ms <= 4,
    )  # fmt: skip


def relayed(remote: Running) -> Line:
    """What the engine's memory grows by while it passes large output on."""
    code = f"for _ in range({OUTPUT_MB * 4}): print('x' * 262_000)"
    before = peak = private_bytes([remote.process])
    with ThreadPoolExecutor(1) as threads, Client(remote.socket) as client:
        begun = time.monotonic()
        running = threads.submit(client.call, "run_python", {"code": code}, timeout_seconds=300)
        while not running.done():
            peak = max(peak, private_bytes([remote.process]))
            time.sleep(0.02)
        answer = running.result()
    if not answer.success:
        raise RuntimeError(answer.error)
    grown, seconds = (peak - before) / MB, time.monotonic() - begun
    return Line(
        f"relaying {OUTPUT_MB} MB of output from a node: memory of the engine",
        "≤ 60 MB more", f"{grown:.0f} MB more ({OUTPUT_MB / seconds:.0f} MB/s)", grown <= 60,
    )  # fmt: skip


def throughput(daemon: Running, callers: int) -> float:
    """Calls in a second of so many callers at once."""

    def work(_: int) -> None:
        with Client(daemon.socket) as client:
            for _ in range(ROUNDS):
                answer = client.call("run_python", {"code": "import time; time.sleep(0.2)"})
                if not answer.success:
                    raise RuntimeError(answer.error)

    with ThreadPoolExecutor(callers) as threads:
        for _ in range(2):  # so that each has a container, and none is being made any more
            list(threads.map(work, range(callers)))
        begun = time.monotonic()
        list(threads.map(work, range(callers)))
    return callers * ROUNDS / (time.monotonic() - begun)
