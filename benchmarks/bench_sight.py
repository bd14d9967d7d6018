"""The cost of metrics, alerts and traces: a daemon that has them against one that has not.

The daemon with them sends spans to a collector and has alerts, the other does neither. What both
count of every call is measured apart, in this process.
"""

from __future__ import annotations

import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.pool import Pool
from pathlib import Path

from benchmarks.bench_daemon import CALL_BODY, CALL_PATH, Running, bare_client, run_daemon
from benchmarks.line import Line
from fumehood import load_config
from fumehood.engine_part import Kernel
from fumehood.observe.clock import SystemClock
from fumehood.observe.ended_call import EndedCall
from fumehood.observe.log import quiet_logger
from fumehood.sight.in_engine import Sight
from fumehood.storage.database import open_database

CLIENTS = 4
CALLS = 100
"""Of each client in one round."""
ROUNDS = 8
PAIRS = 4
"""Of daemons: two equal ones may differ by a few percent as long as they live."""
COUNTED = 100_000
TARGET = 0.05
COUNTING_US = 8

SINK = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *told):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""


def sight_lines() -> Iterator[Line]:
    counting_us = _counting_us()
    yield Line(
        "metrics and alerts: counting one call", f"≤ {COUNTING_US} µs", f"{counting_us:.2f} µs",
        counting_us <= COUNTING_US,
    )  # fmt: skip
    rates: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    with (
        _collector() as endpoint,
        multiprocessing.get_context("spawn").Pool(CLIENTS) as pool,
    ):
        without = {"FUMEHOOD_ALERTS__ENABLED": "false"}
        seen = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        for _ in range(PAIRS):
            compare(without, seen, pool, rates, cpu)
    lost = 1 - statistics.median(with_it / without for without, with_it in rates)
    yield Line(
        "metrics and traces: lost throughput of the calculator", f"≤ {TARGET:.0%}",
        f"{lost:+.1%} ({statistics.median(r[1] for r in rates):.0f} / "
        f"{statistics.median(r[0] for r in rates):.0f} calls/s)", lost <= TARGET,
    )  # fmt: skip
    more = statistics.median(with_it / without for without, with_it in cpu) - 1
    yield Line(
        "metrics and traces: more processor time of the daemon", "–",
        f"{more:+.1%} of {statistics.median(c[0] for c in cpu) * 1e6:.0f} µs a call", None,
    )  # fmt: skip


def compare(
    without: dict[str, str],
    with_it: dict[str, str],
    pool: Pool,
    rates: list[tuple[float, float]],
    cpu: list[tuple[float, float]],
) -> None:
    """Rounds in turn of two new daemons: calls a second, and processor seconds for each call."""
    with run_daemon(without) as plain, run_daemon(with_it) as seen:
        for daemon in (plain, seen):
            _round(pool, daemon)
        for number in range(ROUNDS):
            order = (plain, seen) if number % 2 == 0 else (seen, plain)
            told = {daemon.socket: _round(pool, daemon) for daemon in order}
            rates.append((told[plain.socket][0], told[seen.socket][0]))
            cpu.append((told[plain.socket][1], told[seen.socket][1]))


def _counting_us() -> float:
    with closing(open_database(None)) as database:
        sight = Sight(Kernel(load_config(), database, SystemClock(), quiet_logger()))
    times = []
    for _ in range(3):
        before = time.process_time()
        for _ in range(COUNTED):
            sight.on_call(EndedCall("calculator", "OK", 0.002, ended_by="ok"))
        times.append(time.process_time() - before)
    return min(times) / COUNTED * 1e6


def _round(pool: Pool, daemon: Running) -> tuple[float, float]:
    """Calls a second, and the daemon's processor seconds for each."""
    before, used = time.perf_counter(), sum(daemon.process.cpu_times()[:2])
    pool.map(_hammer, [str(daemon.socket)] * CLIENTS)
    seconds = time.perf_counter() - before
    spent = sum(daemon.process.cpu_times()[:2]) - used
    return CLIENTS * CALLS / seconds, spent / (CLIENTS * CALLS)


def _hammer(path: str) -> None:
    call = bare_client(Path(path), CALL_PATH, CALL_BODY)
    for _ in range(CALLS):
        assert b'"success":true' in call()


@contextmanager
def _collector() -> Iterator[str]:
    """A collector that takes everything and keeps nothing."""
    process = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().decode().strip()}"
    finally:
        process.terminate()
        process.wait(timeout=10)
