"""Output of a program while it runs: from the container through Docker, daemon and socket.

The reading client is another process, so that it takes nothing of the daemon's; it looks at
the bytes only as far as it must to know what came. The program prints lines of 80 characters.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench_daemon import JSON, MB, Running
from benchmarks.line import Line

SETTINGS = {
    "FUMEHOOD_CONTAINER__OUTPUT_KB": str(1024 * 1024),
    "FUMEHOOD_BLOBS_KEPT_MB": "8192",
    "FUMEHOOD_STREAMS_MB": "16384",
}
"""The largest output that can be configured, and room for it."""

PATH = "/v1/tools/run_python/sse"
FIRST = "import time\nprint('first', flush=True)\ntime.sleep(0.05)"
MANY = (
    "line = 'x' * 79 + '\\n'\npart = line * 800\nfor _ in range({count}):\n    print(part, end='')"
)
PART_BYTES = 64_000
SHORT_BYTES, LONG_BYTES = 100_000_000, 500_000_000
SHORT_ROUNDS = 3
"""What waits for the disk at one moment is a matter of chance: about as many moments each."""

ROUNDS = 40
WARM_UP = 10
FLAT_MB = 20
"""Of 400 MB more: what may wait for the disk (`MAX_PENDING_BYTES`, which a kernel that throttles
writers makes use of), and what the memory of a Python process wavers by."""


@dataclass(frozen=True)
class Followed:
    """What a client saw of one call. Times in seconds from the request on."""

    first_event: float
    first_output: float
    last: float
    events_bytes: int
    end: bytes


def stream_lines(daemon: Running) -> Iterator[Line]:
    """First byte, throughput, memory. The daemon must have `SETTINGS`."""
    with multiprocessing.get_context("spawn").Pool(1) as reader:
        firsts = [reader.apply(follow, (daemon.socket, FIRST)) for _ in range(WARM_UP + ROUNDS)][
            WARM_UP:
        ]
        for what, times in (
            ("first event", [one.first_event for one in firsts]),
            ("first output of the program", [one.first_output for one in firsts]),
        ):
            middle_ms = statistics.median(times) * 1e3
            yield Line(f"stream: {what}", "≤ 20 ms", f"{middle_ms:.1f} ms", middle_ms <= 20)
        peaks = []
        for size, rounds in ((SHORT_BYTES, SHORT_ROUNDS), (LONG_BYTES, 1)):
            with peak_memory(daemon.process) as peak:
                for _ in range(rounds):
                    work = (daemon.socket, MANY.format(count=size // PART_BYTES))
                    seen = reader.apply(follow, work)
                    check(seen, size)
            peaks.append(peak[0] / MB)
        rate = LONG_BYTES / seen.last / 1e6
        yield Line(
            f"stream of {LONG_BYTES // 10**6} MB to a reading client",
            "≥ 50 MB/s", f"{rate:.0f} MB/s", rate >= 50,
        )  # fmt: skip
        grown = peaks[1] - peaks[0]
        yield Line(
            f"daemon's memory at {LONG_BYTES // 10**6} MB against {SHORT_BYTES // 10**6} MB",
            f"flat (≤ {FLAT_MB} MB)", f"{grown:+.1f} MB ({peaks[1]:.0f} MB)", grown <= FLAT_MB,
        )  # fmt: skip


def follow(path: Path, code: str) -> Followed:
    """Follow one call to its end."""
    connection = http.client.HTTPConnection("bench")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    body = {"arguments": {"code": code}, "options": {"timeout_seconds": 120}}
    before = time.perf_counter()
    connection.request("POST", PATH, json.dumps(body), JSON)
    answer = connection.getresponse()
    first_event = first_output = 0.0
    count, end = 0, b""
    while chunk := answer.read1(256 * 1024):
        first_event = first_event or time.perf_counter() - before
        if not first_output and b"event: tool_output" in end + chunk:
            first_output = time.perf_counter() - before
        count += len(chunk)
        end = (end + chunk)[-16_384:] if len(chunk) < 16_384 else chunk[-16_384:]
    last = time.perf_counter() - before
    connection.close()
    if not first_output:
        raise RuntimeError(f"nothing was printed: {end[-500:]!r}")
    return Followed(first_event, first_output, last, count, end)


@contextmanager
def peak_memory(process: psutil.Process) -> Iterator[list[int]]:
    """The largest resident size that was seen meanwhile."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def check(seen: Followed, size: int) -> None:
    """A benchmark of half an output measures nothing."""
    data = seen.end.rpartition(b"\ndata: ")[2]
    printed = size // PART_BYTES * PART_BYTES
    envelope = json.loads(data)
    if envelope["metadata"]["resources"]["output_bytes"] != printed or seen.events_bytes < printed:
        raise RuntimeError(f"not all of it came: {data[:300]!r}")
    if "resource_url" not in envelope["data"]:
        raise RuntimeError(f"it was not kept: {data[:300]!r}")
