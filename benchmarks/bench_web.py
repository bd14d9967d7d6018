"""The web console: how long the inbox takes with many approvals, and how soon a new one is there."""

from __future__ import annotations

import os
import queue
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2

from benchmarks.bench_daemon import FUMEHOOD, run_daemon
from benchmarks.line import Line
from fumehood import Client

PENDING = 1000
ROUNDS = 20
NEWS = 15
INBOX_MS = 150.0
NEWS_MS = 500.0
POLICY = '[[rules]]\nid = "look"\ndecision = "ask"\ntools = ["calculator"]\nreason = "x"\n'
TIMEOUT = httpx2.Timeout(60.0)


def web_lines(pending: int = PENDING) -> Iterator[Line]:
    """Every line of this file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    policy = home / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "FUMEHOOD_HOME": str(home),
        "FUMEHOOD_POLICY_FILE": str(policy),
        "FUMEHOOD_APPROVALS__MAX_PENDING": str(pending + 1000),
        "FUMEHOOD_APPROVALS__MAX_PENDING_PER_PRINCIPAL": str(pending + 1000),
    }
    made = subprocess.run(
        [str(FUMEHOOD), "approvers", "init"], env=environment, capture_output=True, check=True
    )
    credential = made.stdout.decode().strip()
    with ExitStack() as running:
        running.callback(shutil.rmtree, home, ignore_errors=True)
        running.enter_context(run_daemon(environment, socket=home / "engine.sock"))
        caller = running.enter_context(Client(home / "engine.sock"))
        for start in range(0, pending, 500):
            caller.batch([_call(number) for number in range(start, min(start + 500, pending))])
        link = running.enter_context(console(environment, credential))
        address, token = link.split("/login?token=")
        browser = running.enter_context(httpx2.Client(base_url=address, timeout=TIMEOUT))
        browser.post("/login", data={"token": token}, headers={"origin": address})
        inbox_ms = _inbox_ms(browser, pending)
        news_ms = _news_ms(browser, caller, pending)
    yield Line(
        f"web: the inbox with {pending:,} pending, rendered", f"≤ {INBOX_MS:g} ms",
        f"{inbox_ms:.0f} ms", inbox_ms <= INBOX_MS,
    )  # fmt: skip
    yield Line(
        f"web: from the call to the list in the browser, {pending:,} pending", f"≤ {NEWS_MS:g} ms",
        f"{news_ms:.0f} ms", news_ms <= NEWS_MS,
    )  # fmt: skip


def _call(number: int) -> dict[str, object]:
    return {"tool": "calculator", "arguments": {"expression": f"{number} + 1"}}


@contextmanager
def console(environment: dict[str, str], credential: str) -> Iterator[str]:
    """`fumehood web`; its link."""
    process = subprocess.Popen(
        [str(FUMEHOOD), "web", "--port", "0", "--credential-stdin"], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        process.stdin.write(f"{credential}\n")
        process.stdin.flush()
        yield next(line.strip() for line in process.stdout if "token=" in line)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _inbox_ms(browser: httpx2.Client, pending: int) -> float:
    times = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        page = browser.get("/inbox").text
        times.append((time.perf_counter() - before) * 1e3)
        if f"{pending:,}</span>" not in page:
            raise RuntimeError("the inbox does not show what waits")
    return statistics.median(times)


def _news_ms(browser: httpx2.Client, caller: Client, pending: int) -> float:
    """From just before a call to the end of the list's new HTML, which the event asked for."""
    events: queue.Queue[float] = queue.Queue()

    def follow() -> None:
        with suppress(httpx2.HTTPError), browser.stream("GET", "/events") as stream:
            for line in stream.iter_lines():
                if line == "event: approvals":
                    events.put(time.perf_counter())
                if events.qsize() > NEWS + 100:
                    return

    threading.Thread(target=follow, daemon=True).start()
    events.get(timeout=30)  # the state at the start
    times = []
    for number in range(NEWS):
        time.sleep(0.3)
        while not events.empty():
            events.get()
        before = time.perf_counter()
        caller.call("calculator", {"expression": f"{pending + number} * 2"})
        events.get(timeout=30)
        if (
            f"{pending + number} * 2"
            not in browser.get("/inbox/list", headers={"hx-request": "true"}).text
        ):
            raise RuntimeError("the new call is not in the list")
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)
