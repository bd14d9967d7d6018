"""Output of a program while it runs: from the container through Docker, daemon and socket; many
streams at once; and a long answer of a service on its way through.

The reading client is another process, so that it takes nothing of the daemon's; it looks at
the bytes only as far as it must to know what came. The program prints lines of 80 characters.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import re
import selectors
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench_daemon import JSON, MB, Running, run_daemon
from benchmarks.line import Line
from benchmarks.ticking import PERIOD_NS

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
        firsts = [
            reader.apply(follow_code, (daemon.socket, FIRST)) for _ in range(WARM_UP + ROUNDS)
        ][WARM_UP:]
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
                    seen = reader.apply(follow_code, work)
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


def follow_code(path: Path, code: str) -> Followed:
    """Follow one program to its end."""
    return follow(path, PATH, {"code": code}, timeout_seconds=120)


def follow(path: Path, address: str, arguments: dict[str, object], **options: object) -> Followed:
    """Follow one call to its end."""
    connection = http.client.HTTPConnection("bench")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    body = {"arguments": arguments, "options": options}
    before = time.perf_counter()
    connection.request("POST", address, json.dumps(body), JSON)
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


# -- many streams at once ------------------------------------------------------------------

STREAMS, TICKS, TICK_ROUNDS = 200, 100, 3
START_S = 2.0
"""From the first request until the first part is due: every stream is open by then."""

TICK = re.compile(rb'"text":"(\d+)\\n"')
TICK_PATH = "/v1/tools/tick/sse"


def open_stream_lines() -> Iterator[Line]:
    """Delay of each event from the moment at which it was due until a client has it.

    The streams of the first line have phases of their own, as those of 200 callers do. In the
    second line all 200 events of each tenth of a second are due in one instant.
    """
    for is_at_once, target_ms in ((False, 250), (True, None)):
        seen = [many_streams(is_at_once=is_at_once) for _ in range(TICK_ROUNDS)]
        lost = sum(one.lost for one in seen)
        p99_ms = statistics.median(one.p99_ms for one in seen)
        middle_ms = statistics.median(one.median_ms for one in seen)
        cpu_ms = statistics.median(one.cpu_ms for one in seen)
        phases = "due in one instant" if is_at_once else "phases spread over a period"
        yield Line(
            f"{STREAMS} open streams, 10 events a second each, {phases}: lost, p99 delay",
            f"none, ≤ {target_ms} ms" if target_ms else "none, –",
            f"{lost} of {STREAMS * TICKS * TICK_ROUNDS}, {p99_ms:.0f} ms (median {middle_ms:.0f} "
            f"ms, {cpu_ms:.2f} ms of processor time an event)",
            lost == 0 and (target_ms is None or p99_ms <= target_ms),
        )


@dataclass(frozen=True)
class ManySeen:
    """What one client saw of all streams."""

    lost: int
    median_ms: float
    p99_ms: float
    cpu_ms: float
    """Of the daemon's processor time, for each event."""


def many_streams(*, is_at_once: bool) -> ManySeen:
    """Follow all streams to their ends."""
    command = [sys.executable, "-m", "benchmarks.ticking"]
    settings = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with (
        run_daemon(settings, command) as daemon,
        multiprocessing.get_context("spawn").Pool(1) as reader,
    ):
        before = daemon.process.cpu_times()
        delays_ms = reader.apply(read_ticks, (daemon.socket, is_at_once))
        after = daemon.process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return ManySeen(
        STREAMS * TICKS - len(delays_ms),
        statistics.median(delays_ms),
        statistics.quantiles(delays_ms, n=100)[98],
        used_s * 1e3 / (STREAMS * TICKS),
    )


def read_ticks(path: Path, is_at_once: bool) -> list[float]:
    """The delay of each event, in milliseconds. Raises RuntimeError if a call fails."""
    delays_ms: list[float] = []
    succeeded = 0
    start_ns = time.monotonic_ns() + int(START_S * 1e9)
    with selectors.DefaultSelector() as selector:
        for number in range(STREAMS):
            phase_ns = 0 if is_at_once else number * PERIOD_NS // STREAMS
            body = json.dumps({"arguments": {"start_ns": start_ns + phase_ns, "count": TICKS}})
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            head = f"POST {TICK_PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            selector.register(connection, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                chunk = key.fileobj.recv(65_536)
                now_ns = time.monotonic_ns()
                key.data.extend(chunk)
                whole = key.data.rfind(b"\n\n") + 2 if b"\n\n" in key.data else 0
                delays_ms += [(now_ns - int(due)) / 1e6 for due in TICK.findall(key.data[:whole])]
                succeeded += b"event: tool_result" in key.data[:whole]
                del key.data[:whole]
                if not chunk:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    if succeeded != STREAMS:
        raise RuntimeError(f"{STREAMS - succeeded} calls failed")
    return delays_ms


# -- a long answer of a service ------------------------------------------------------------

RELAYED_BYTES = 1_000_000_000
RELAY_PIECE = (b"data: " + b"x" * 73 + b"\n") * 800
RELAY_PEAK_MB = 60


def relay_lines() -> Iterator[Line]:
    """Memory of the daemon while a REST tool relays an answer to one client that reads it."""
    context = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))
    service = context.Process(target=serve_answers, args=(listener,))
    service.start()
    authority = f"127.0.0.1:{listener.getsockname()[1]}"
    tools = Path(tempfile.mkdtemp(prefix="fh-tools-", dir="/tmp"))
    parameters = {"properties": {"pieces": {"type": "integer"}}, "required": ["pieces"]}
    definition = {
        "name": "relay", "type": "REST", "description": "Relay an answer.", "method": "GET",
        "endpoint": f"http://{authority}/{{pieces}}", "parameters": parameters, "streaming": True,
        "timeout": 600_000,
    }  # fmt: skip
    (tools / "relay.json").write_text(json.dumps(definition))
    (tools / "relay.json").chmod(0o600)
    settings = {
        **SETTINGS,
        "FUMEHOOD_REST__STREAM_KB": str(1024 * 1024),
        "FUMEHOOD_REST__ALLOWED_HOSTS": json.dumps([authority]),
        "FUMEHOOD_TOOLS_DIRECTORY": str(tools),
    }
    try:
        with (
            run_daemon(settings) as daemon,
            multiprocessing.get_context("spawn").Pool(1) as reader,
        ):
            reader.apply(follow_relay, (daemon.socket, 10))
            time.sleep(1)
            idle_mb = daemon.process.memory_info().rss / MB
            with peak_memory(daemon.process) as peak:
                seen = reader.apply(
                    follow_relay, (daemon.socket, RELAYED_BYTES // len(RELAY_PIECE))
                )
    finally:
        service.terminate()
        service.join()
        listener.close()
        shutil.rmtree(tools, ignore_errors=True)
    grown = peak[0] / MB - idle_mb
    rate = RELAYED_BYTES / seen.last / 1e6
    yield Line(
        f"relaying {RELAYED_BYTES // 10**9} GB of a REST tool: daemon's peak memory over idle",
        f"≤ {RELAY_PEAK_MB} MB", f"{grown:.1f} MB ({idle_mb:.0f} MB idle, {rate:.0f} MB/s)",
        grown <= RELAY_PEAK_MB,
    )  # fmt: skip


def serve_answers(listener: socket.socket) -> None:
    """Answer `GET /COUNT` with so many pieces, one connection after the other."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as requests:
            while line := requests.readline():
                count = int(line.split()[1].lstrip(b"/"))
                while requests.readline() != b"\r\n":
                    pass
                size = count * len(RELAY_PIECE)
                head = (
                    f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {size}\r\n\r\n"
                )
                connection.sendall(head.encode())
                for _ in range(count):
                    connection.sendall(RELAY_PIECE)


def follow_relay(path: Path, pieces: int) -> Followed:
    """Follow one relayed answer to its end, and check that all of it came."""
    seen = follow(path, "/v1/tools/relay/sse", {"pieces": pieces}, timeout_seconds=600)
    size = pieces * len(RELAY_PIECE)
    envelope = json.loads(seen.end.rpartition(b"\ndata: ")[2])
    if seen.events_bytes < size or b"tool_notice" in seen.end or envelope["error"] is not None:
        raise RuntimeError(f"not all of it came: {seen.end[-800:]!r}")
    if size > 2 << 20:
        told = envelope["data"]["truncation_info"]
        if told["original_length"] != size or "resource_url" not in envelope["data"]:
            raise RuntimeError(f"it was not kept: {told!r}")
    return seen
