"""The record of calls: what it costs, and how soon it is found and seen."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2

from benchmarks.bench_daemon import FUMEHOOD, run_daemon
from benchmarks.bench_sight import CLIENTS, PAIRS, compare
from benchmarks.bench_web import TIMEOUT, console
from benchmarks.line import Line
from fumehood import Client, ControlClient
from fumehood.storage.calls import CallRow, Record, _keep
from fumehood.storage.database import Database, open_database

LOGGED = 100_000
ROUNDS = 15
LOOKS = 40
LOST = 0.05
WORDS = ("prices", "tea", "coffee", "milk", "sugar", "bread", "error", "total", "list", "file")

PRINTS = """
import time
for _ in range(200):
    print(time.time(), flush=True)
    time.sleep(0.1)
"""


def record_lines() -> Iterator[Line]:
    yield _cost()
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        database = open_database(home / "state.db")
        _fill(database)
        database.close()
        yield from _looks(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _cost() -> Line:
    rates: list[tuple[float, float]] = []
    with multiprocessing.get_context("spawn").Pool(CLIENTS) as pool:
        for _ in range(2 * PAIRS):
            compare({"FUMEHOOD_RECORD__CALLS": "none"}, {}, pool, rates, [])
    lost = 1 - statistics.median(with_it / without for without, with_it in rates)
    return Line(
        "record of calls: lost throughput of the calculator", f"≤ {LOST:.0%}",
        f"{lost:+.1%} ({statistics.median(r[1] for r in rates):.0f} / "
        f"{statistics.median(r[0] for r in rates):.0f} calls/s)", lost <= LOST,
    )  # fmt: skip


def _fill(database: Database) -> None:
    """Write calls with records of the size of usual ones, of the last days."""
    chance = random.Random(1)
    begun = datetime.now(UTC) - timedelta(days=3)
    for start in range(0, LOGGED, 1000):
        rows = [_row(chance, number, begun) for number in range(start, start + 1000)]
        database.write_now(lambda connection, rows=rows: _keep(connection, rows))


def _row(chance: random.Random, number: int, begun: datetime) -> dict[str, object]:
    words = " ".join(chance.choices(WORDS, k=40)) + f" n{number}"
    envelope = b'{"success":true,"data":{"text":"%b"}}' % words.encode()
    code = f"print({words!r})"
    record = Record.of({"code": code}, envelope, ["code", code, "text", words])
    at = begun + timedelta(seconds=number)
    row = CallRow(
        id=f"call_{number:024x}", at=at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        principal_id=f"uid:{os.geteuid()}", agent_id=None, session_id=None,
        trace_id=f"trace_20260101_{number:012x}", tool="run_python", version="1.0.0",
        code="TIMEOUT" if number % 777 == 1 else "OK", ended_by="ok", total_ms=1.5, cpu_ms=0.5,
        cost="0.000000", currency="USD", input_tokens=9, output_tokens=3, tokens_used=0,
        record=record,
    )  # fmt: skip
    return dict(row)


def _looks(home: Path) -> Iterator[Line]:
    environment = {"PATH": os.environ["PATH"], "FUMEHOOD_HOME": str(home)}
    made = subprocess.run(
        [str(FUMEHOOD), "approvers", "init"], env=environment, capture_output=True, check=True
    )
    credential = made.stdout.decode().strip()
    with ExitStack() as running:
        running.enter_context(run_daemon(environment, socket=home / "engine.sock"))
        control = running.enter_context(ControlClient(home / "control.sock", credential=credential))
        link = running.enter_context(console(environment, credential))
        address, token = link.split("/login?token=")
        browser = running.enter_context(httpx2.Client(base_url=address, timeout=TIMEOUT))
        browser.post("/login", data={"token": token}, headers={"origin": address})
        page = browser.get("/calls")
        yield _line(f"web: calls page with {LOGGED:,} records", lambda: browser.get("/calls"), 150)
        for words in ("n77777", "tea coffee", '"total list"', "nothing"):
            yield _line(
                f"text search in {LOGGED:,} records: {words}",
                lambda words=words: control.calls.list(text=words, limit=50), 300,
            )  # fmt: skip
        kilobytes = len(page.content) / 1000
        yield Line("web: calls page, size", "≤ 100 KB", f"{kilobytes:.0f} KB", kilobytes <= 100)
        yield _live(browser, home / "engine.sock")


def _line(what: str, work: Callable[[], object], most_ms: float) -> Line:
    times = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        work()
        times.append((time.perf_counter() - before) * 1e3)
    took_ms = statistics.median(times)
    return Line(what, f"≤ {most_ms:g} ms", f"{took_ms:.0f} ms", took_ms <= most_ms)


def _live(browser: httpx2.Client, socket: Path) -> Line:
    """How old each printed line is when the page of its call has it."""

    def call() -> None:
        with Client(socket) as caller:
            caller.call("run_python", {"code": PRINTS}, cancel_on_disconnect=True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    with Client(socket) as caller:
        while not (found := caller.calls(state="running").items):
            time.sleep(0.05)
        call_id, mark, ages_ms = found[0].call_id, "", []
        last = time.time()  # what was printed before is no news
        for _ in range(LOOKS):
            time.sleep(0.2)  # as the page does
            part = browser.get(
                f"/calls/{call_id}/running?mark={mark}", headers={"hx-request": "true"}
            )
            if part.status_code == 204:
                continue
            (mark,) = re.findall(r"mark=([0-9a-f]{16})", part.text)
            stamps = [float(one) for one in re.findall(r"\d{10}\.\d+", part.text)]
            ages_ms += [(time.time() - one) * 1e3 for one in stamps if one > last]
            last = max([last, *stamps])
        caller.cancel(call_id)
    thread.join(10)
    late_ms = statistics.quantiles(ages_ms, n=20)[-1]
    return Line(
        "web: live output of a call, 95 % within", "≤ 300 ms", f"{late_ms:.0f} ms", late_ms <= 300
    )
