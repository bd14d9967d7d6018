"""`make bench`: every speed and memory target, measured and judged in one run.

Prints target, figure and verdict for each line; exit status 1 where one is missed. Times
are medians; comparisons are ratios of requests made in turn (A B A B …), so that a machine
that changes its speed changes both.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bench_streams
from benchmarks.bench_approvals import approval_lines
from benchmarks.bench_audit import audit_lines
from benchmarks.bench_batch import batch_lines
from benchmarks.bench_budgets import budget_lines
from benchmarks.bench_cache import cache_lines
from benchmarks.bench_calls import call_log
from benchmarks.bench_cli import cli_lines
from benchmarks.bench_cluster import cluster_lines
from benchmarks.bench_code_mode import code_mode_lines
from benchmarks.bench_containers import container_lines, small_image_lines
from benchmarks.bench_daemon import (
    CALL_BODY,
    CALL_PATH,
    MB,
    SMALLEST_IMAGE,
    Request,
    Running,
    bare_client,
    private_bytes,
    product_client,
    run_daemon,
    run_floor,
    written_bytes,
)
from benchmarks.bench_direct import direct_lines
from benchmarks.bench_formats import format_lines
from benchmarks.bench_gateway import gateway_lines
from benchmarks.bench_javascript import javascript_lines
from benchmarks.bench_keys import key_lines
from benchmarks.bench_mcp import mcp_lines
from benchmarks.bench_policy import policy_lines
from benchmarks.bench_projects import project_lines
from benchmarks.bench_rate_limits import rate_limit_lines
from benchmarks.bench_record import record_lines
from benchmarks.bench_registry import registry_lines
from benchmarks.bench_rest import rest_lines
from benchmarks.bench_restricted import restricted_lines
from benchmarks.bench_sessions import session_lines
from benchmarks.bench_sight import sight_lines
from benchmarks.bench_web import web_lines
from benchmarks.bench_workshop import workshop_lines
from benchmarks.line import Line

PAIRS = 3000
WARM_UP = 200
CLIENTS = 8
CALLS_PER_CLIENT = 600
FLAT_CALLS = 10_000
STARTS = 3


def main() -> int:
    lines: list[Line] = []
    for line in measure():
        verdict = {True: "ok", False: "MISSED", None: "info"}[line.met]
        print(f"{verdict:6}  {line.what}: {line.figure}  (target: {line.target})", flush=True)
        lines.append(line)
    missed = [line for line in lines if line.met is False]
    print(f"{len(lines)} lines, {len(missed)} missed")
    return 1 if missed else 0


def measure() -> Iterator[Line]:
    yield first_answer()
    yield from registry_lines()
    yield from format_lines()
    yield from policy_lines()
    yield from rate_limit_lines()
    with run_daemon() as daemon, run_floor() as floor:
        yield from idle_memory(daemon)
        yield from ratios(daemon, floor)
        yield throughput(daemon)
        yield from batch_lines(daemon)
        yield from flatness(daemon)
        yield from cli_lines(daemon)
    yield from mcp_lines()
    yield from cache_lines()
    yield from call_log()
    yield from key_lines()
    yield from audit_lines()
    yield from budget_lines()
    yield from approval_lines()
    yield from rest_lines()
    yield from sight_lines()
    yield from web_lines()
    yield from record_lines()
    with run_daemon() as daemon:
        yield from restricted_lines(daemon)
    with run_daemon() as daemon:
        yield from container_lines(daemon)
        yield from workshop_lines(daemon)
        yield from code_mode_lines(daemon)
        yield from javascript_lines(daemon)
    with run_daemon(SMALLEST_IMAGE) as daemon:
        yield from small_image_lines(daemon)
    yield from direct_lines()
    yield from session_lines()
    yield from project_lines()
    yield from cluster_lines()
    yield from gateway_lines()
    with run_daemon(bench_streams.SETTINGS) as daemon:
        yield from bench_streams.stream_lines(daemon)
    yield from bench_streams.open_stream_lines()
    yield from bench_streams.relay_lines()


def first_answer() -> Line:
    """From starting `fumehood serve` to the first calculator answer."""
    times = []
    for _ in range(STARTS):
        with run_daemon() as daemon:
            check(bare_client(daemon.socket, CALL_PATH, CALL_BODY)())
            times.append(time.monotonic() - daemon.started)
    seconds = statistics.median(times)
    return Line("first answer after serve", "≤ 1.5 s", f"{seconds:.2f} s", seconds <= 1.5)


def idle_memory(daemon: Running) -> Iterator[Line]:
    check(bare_client(daemon.socket, CALL_PATH, CALL_BODY)())
    time.sleep(1)
    resident = daemon.process.memory_info().rss / MB
    yield Line("idle daemon, resident", "≤ 90 MB", f"{resident:.1f} MB", resident <= 90)
    private = private_bytes(daemon.guest()) / MB
    count = len(daemon.guest())
    yield Line(
        f"idle guest, private ({count} processes together)", "≤ 20 MB", f"{private:.1f} MB",
        private <= 20,
    )  # fmt: skip


def ratios(daemon: Running, floor: Running) -> Iterator[Line]:
    for make, name, target in (
        (bare_client, "both with the standard library's client", 2.2),
        (product_client, "both with the product's client", None),
    ):
        empty = make(floor.socket, "/v1/empty", b"{}")
        call = make(daemon.socket, CALL_PATH, CALL_BODY)
        empty_ms, call_ms = paired(empty, call)
        ratio = call_ms / empty_ms
        yield Line(
            f"calculator / empty request, {name}",
            f"≤ {target}" if target else "–",
            f"{ratio:.2f} ({call_ms:.3f} ms / {empty_ms:.3f} ms)",
            ratio <= target if target else None,
        )


def paired(first: Request, second: Request) -> tuple[float, float]:
    """Medians in milliseconds of two requests made in turn."""
    for _ in range(WARM_UP):
        first()
        check(second())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(PAIRS):
        for request, taken in zip((first, second), times, strict=True):
            before = time.perf_counter()
            request()
            taken.append(time.perf_counter() - before)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


def throughput(daemon: Running) -> Line:
    with multiprocessing.get_context("spawn").Pool(CLIENTS) as pool:
        pool.map(hammer, [(daemon.socket, WARM_UP)] * CLIENTS)
        before = time.perf_counter()
        pool.map(hammer, [(daemon.socket, CALLS_PER_CLIENT)] * CLIENTS)
        seconds = time.perf_counter() - before
    rate = CLIENTS * CALLS_PER_CLIENT / seconds
    return Line(
        f"{CLIENTS} clients, calculator", "≥ 800 calls/s", f"{rate:.0f} calls/s", rate >= 800
    )


def hammer(work: tuple[Path, int]) -> None:
    """One client process."""
    path, count = work
    call = bare_client(path, CALL_PATH, CALL_BODY)
    for _ in range(count):
        check(call())


def flatness(daemon: Running) -> Iterator[Line]:
    """After the first calls have settled everything, 10 000 more change nothing."""
    call = bare_client(daemon.socket, CALL_PATH, CALL_BODY)
    for _ in range(2000):
        call()
    before = footprint(daemon)
    for _ in range(FLAT_CALLS):
        check(call())
    after = footprint(daemon)
    grown = after.written_mb - before.written_mb
    yield Line(f"{FLAT_CALLS} calls: memory", "flat (≤ 3 MB)", f"{grown:+.2f} MB", grown <= 3)
    yield Line(
        f"{FLAT_CALLS} calls: descriptors", "flat", f"{before.files} → {after.files}",
        after.files <= before.files,
    )  # fmt: skip
    yield Line(
        f"{FLAT_CALLS} calls: processes", "flat", f"{before.processes} → {after.processes}",
        after.processes <= before.processes,
    )  # fmt: skip


@dataclass(frozen=True)
class Footprint:
    """What daemon and guest hold."""

    written_mb: float
    files: int
    processes: int


def footprint(daemon: Running) -> Footprint:
    time.sleep(1)  # children that are being replaced are counted once, not twice
    family = [daemon.process, *daemon.guest()]
    return Footprint(
        written_mb=written_bytes(family) / MB,
        files=daemon.process.num_fds() + daemon.guest()[0].num_fds(),
        processes=len(family),
    )


def check(answer: bytes) -> None:
    """A benchmark of wrong answers measures nothing."""
    if json.loads(answer).get("data") != {"value": 1144, "text": "1144"}:
        raise RuntimeError(f"wrong answer: {answer[:200]!r}")


if __name__ == "__main__":
    sys.exit(main())
