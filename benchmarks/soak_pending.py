"""Ten thousand calls that wait: none is lost, the next one is refused, and nobody else waits.

The engine is killed in the middle of it and started again.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench_daemon import MB
from conftest import Daemon
from support.approving import approving_daemon, ran
from support.clients import client_of

WAITING = 10_000
ASKING = 4
LOOKS = 50
GROWTH_MB = 40
"""What they may take of the daemon's memory: the records are in the database."""

SETTINGS = {
    "approvals__max_pending": str(WAITING),
    "approvals__max_pending_per_principal": str(WAITING),
}


def report_pending() -> bool:
    """Park, look, say yes, kill, look again; whether everything was as promised."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        with approving_daemon(home, **SETTINGS) as daemon:
            process = psutil.Process(daemon.process.pid)
            before = process.memory_info().rss
            started = time.monotonic()
            with ThreadPoolExecutor(ASKING) as pool:
                parts = pool.map(_ask, [daemon] * ASKING, range(ASKING))
                ids = [one for part in parts for one in part]
            seconds = time.monotonic() - started
            grown = (process.memory_info().rss - before) / MB
            with client_of("blocking", daemon.socket) as caller:
                refused = caller.call("note", {"text": "one too many"}).error.code
            first = _served(daemon, ids[WAITING // 2], 1)
            daemon.process.kill()
            daemon.process.wait(timeout=30)
        started = time.monotonic()
        with approving_daemon(home, credential=daemon.credential, **SETTINGS) as after:
            start_s = time.monotonic() - started
            second = _served(after, ids[WAITING // 2 + 1], 2)
            left = _count(after)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print("\n## Many that wait\n")
    print(
        f"{len(ids)} calls parked in {seconds:.0f} s by {ASKING} callers, +{grown:.0f} MB; "
        f"the engine killed, and ready again after {start_s:.1f} s.\n"
    )
    print("| | newest 50 | from a yes to the deed | calculator meanwhile |\n|---|---|---|---|")
    print(f"| before the kill | {first} |\n| after it | {second} |\n")
    verdicts = {
        f"{WAITING} wait, and the next one hears RATE_LIMITED": (
            len(set(ids)) == WAITING and refused == "RATE_LIMITED"
        ),
        "after the kill all of them wait but those that had their yes": left == WAITING - 2,
        f"they take at most {GROWTH_MB} MB of memory": grown <= GROWTH_MB,
    }
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    return all(verdicts.values())


def _ask(daemon: Daemon, part: int) -> list[str]:
    """Make a part of the calls. No two are equal: an equal one would be the same call."""
    with client_of("blocking", daemon.socket) as caller:
        return [
            caller.call("note", {"text": f"{part}-{number}"}).error.approval_id
            for number in range(WAITING // ASKING)
        ]


def _served(daemon: Daemon, approval_id: str, deeds: int) -> str:
    """How long people wait while so many calls wait, as cells of a table."""
    with _control(daemon) as control, client_of("blocking", daemon.socket) as caller:
        looks, sums = [], []
        for _ in range(LOOKS):
            started = time.monotonic()
            assert len(control.approvals.list().items) == 50
            looks.append(time.monotonic() - started)
            started = time.monotonic()
            assert caller.call("calculator", {"expression": "1 + 1"}).success
            sums.append(time.monotonic() - started)
        started = time.monotonic()
        control.approvals.approve(approval_id, version=None)
        while len(ran(daemon)) < deeds:
            time.sleep(0.001)
        taken = (statistics.median(looks), time.monotonic() - started, statistics.median(sums))
    return " | ".join(f"{seconds * 1e3:.1f} ms" for seconds in taken)


def _count(daemon: Daemon) -> int:
    """How many wait, counted page by page as people see them."""
    found: set[str] = set()
    cursor = None
    with _control(daemon) as control:
        while True:
            page = control.approvals.list(state="pending", limit=100, cursor=cursor)
            found |= {one.id for one in page.items}
            cursor = page.next_cursor
            if cursor is None:
                return len(found)


def _control(daemon: Daemon) -> Any:
    return client_of("blocking", daemon.control, control=True, credential=daemon.credential)
