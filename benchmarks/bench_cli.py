"""What one command costs: processor time of the process, from its start to its end."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator

from benchmarks.bench_daemon import FUMEHOOD, Running
from benchmarks.line import Line

RUNS = 15
TARGET_S = 0.25


def cli_lines(daemon: Running) -> Iterator[Line]:
    """One `fumehood call` of a calculator, user and system time."""
    times = [_processor_s(daemon) for _ in range(RUNS)]
    seconds = statistics.median(times)
    yield Line(
        "fumehood call, processor time", f"≤ {TARGET_S} s",
        f"{seconds:.3f} s ({min(times):.3f} … {max(times):.3f} s)", seconds <= TARGET_S,
    )  # fmt: skip


def _processor_s(daemon: Running) -> float:
    command = [str(FUMEHOOD), "call", "calculator", '{"expression": "1 + 1"}']
    environment = {"PATH": os.environ["PATH"], "FUMEHOOD_SOCKET": str(daemon.socket)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"fumehood call ended with {process.returncode}")
    return used.ru_utime + used.ru_stime
