"""Sessions: how long a new one takes, one that is paused, and many after their daemon was killed."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.bench_containers import docker, image_id, timed
from benchmarks.bench_daemon import SMALLEST_IMAGE, Running, bare_client, run_daemon
from benchmarks.line import Line
from fumehood.client import Client
from support.wheels import only_from, write_wheel

ROUNDS = 7
CALLS = 40
MANY = 50
STOPPED = 500
REFILL_S = 4
"""In which the pool makes its warm container anew."""

PATH = "/v1/tools/run_python/call"


def session_lines() -> Iterator[Line]:
    """As configured by default, but for the last line."""
    with run_daemon() as daemon:
        yield new_session(daemon)
        yield from paused(daemon)
        yield durable(daemon)
        yield tried(daemon)
        if os.geteuid() == 0:  # an engine of another user makes no disks
            yield from on_disk(daemon)
            yield forked(daemon)
    yield from with_packages()
    if os.geteuid() == 0:
        yield from many_stopped()
    yield taken_over()


def new_session(daemon: Running) -> Line:
    """With a warm container, as the next caller finds one."""
    run = docker("run", "--rm", "--entrypoint=/usr/bin/python3", image_id("python-data"))
    new_s, run_s = [], []
    with Client(daemon.socket) as client:
        client.call("run_python", {"code": "0"})
        for _ in range(ROUNDS):
            time.sleep(REFILL_S)
            begun = time.monotonic()
            made = client.create_session()
            new_s.append(time.monotonic() - begun)
            client.end_session(made.id)
            run_s.append(timed(run))
    new_ms, run_ms = (statistics.median(taken) * 1e3 for taken in (new_s, run_s))
    ratio = new_ms / run_ms
    return Line(
        "new session, with a warm container / docker run of the same image",
        "≤ 0.2", f"{ratio:.2f} ({new_ms:.0f} ms / {run_ms:.0f} ms)", ratio <= 0.2,
    )  # fmt: skip


def tried(daemon: Running) -> Line:
    """In turn, on an empty workspace; a command that changes nothing, so that nobody is asked."""
    plain_s, tried_s = [], []
    command = {"command": "true"}
    with Client(daemon.socket) as client:
        session = client.create_session(durable=True).id
        for _ in range(CALLS):
            plain_s.append(timed(lambda: client.call("run_shell", command, session_id=session)))
            tried_s.append(
                timed(lambda: client.call("run_shell", command, session_id=session, preview=True))
            )
        client.end_session(session)
    tried_ms, plain_ms = (statistics.median(taken) * 1e3 for taken in (tried_s, plain_s))
    ratio = tried_ms / plain_ms
    return Line(
        "trial of a command / the plain call, empty durable workspace",
        "≤ 1.5", f"{ratio:.2f} ({tried_ms:.1f} / {plain_ms:.1f} ms)", ratio <= 1.5,
    )  # fmt: skip


def paused(daemon: Running) -> Iterator[Line]:
    """The first call in a session that is frozen, against one in a session that is not."""
    paused_s, active_s, pause_s = [], [], []
    with Client(daemon.socket) as client:
        session = client.create_session().id
        for _ in range(CALLS):
            pause_s.append(timed(lambda: client.pause_session(session)))
            paused_s.append(
                timed(lambda: client.call("run_python", {"code": "0"}, session_id=session))
            )
            active_s.append(
                timed(lambda: client.call("run_python", {"code": "0"}, session_id=session))
            )
        client.end_session(session)
    more_ms = (statistics.median(paused_s) - statistics.median(active_s)) * 1e3
    yield Line(
        "call in a paused session: more than in an active one",
        "≤ 100 ms", f"{more_ms:.0f} ms", more_ms <= 100,
    )  # fmt: skip
    yield Line("pausing a session", "–", f"{statistics.median(pause_s) * 1e3:.0f} ms", None)


def durable(daemon: Running) -> Line:
    """A call that changes a small file, besides 1,000 files that it does not change."""
    files = "import os\nos.mkdir('d')\nfor n in range(1000): open(f'd/{n}', 'w').write(f'{n}' * 50)"
    change = {"code": "import time\nprint(time.time_ns(), file=open('small', 'w'))"}
    durable_s, plain_s = [], []
    with Client(daemon.socket) as client:
        saved, plain = (client.create_session(durable=is_saved).id for is_saved in (True, False))
        for session in (saved, plain):
            client.call("run_python", {"code": files}, session_id=session)
        for _ in range(CALLS):
            durable_s.append(timed(lambda: client.call("run_python", change, session_id=saved)))
            plain_s.append(timed(lambda: client.call("run_python", change, session_id=plain)))
        client.end_session(saved)
        client.end_session(plain)
    durable_ms, plain_ms = (statistics.median(taken) * 1e3 for taken in (durable_s, plain_s))
    more_ms = durable_ms - plain_ms
    return Line(
        "call in a durable session with 1,000 files that changes one: more than in another",
        "≤ 50 ms", f"{more_ms:.0f} ms ({durable_ms:.0f} ms / {plain_ms:.0f} ms)", more_ms <= 50,
    )  # fmt: skip


def on_disk(daemon: Running) -> Iterator[Line]:
    """Sessions with a disk of 1 GB."""
    with Client(daemon.socket) as client:
        session = client.create_session(disk_mb=1024).id
        other = client.create_session().id

        def call(one: str) -> Callable[[], object]:
            return lambda: client.call("run_python", {"code": "0"}, session_id=one)

        disk_s, memory_s, restart_s = [], [], []
        for _ in range(3 * CALLS):
            disk_s.append(timed(call(session)))
            memory_s.append(timed(call(other)))
        for _ in range(ROUNDS):
            client.stop_session(session)
            restart_s.append(timed(call(session)))
        client.end_session(session)
        client.end_session(other)
        disk_ms, memory_ms = (statistics.median(taken) * 1e3 for taken in (disk_s, memory_s))
        ratio, restart = disk_ms / memory_ms, statistics.median(restart_s)
        yield Line(
            "call in a session with a disk / in one without",
            "≤ 1.1", f"{ratio:.2f} ({disk_ms:.1f} ms / {memory_ms:.1f} ms)", ratio <= 1.1,
        )  # fmt: skip
        yield Line(
            "call in a stopped session, right after the stop",
            "≤ 1.5 s",
            f"{restart:.2f} s",
            restart <= 1.5,
        )


def forked(daemon: Running) -> Line:
    """Ten forks of a session with 200 MB in 2,000 files."""
    write = "import os\nfor n in range(2000): open(f'f{n}', 'wb').write(os.urandom(100_000))"
    with Client(daemon.socket) as client:
        session = client.create_session(disk_mb=512).id
        client.call("run_python", {"code": write}, session_id=session)
        begun = time.monotonic()
        forks = client.fork_session(session, count=10)
        seconds = time.monotonic() - begun
        for one in (*(fork.id for fork in forks), session):
            client.end_session(one)
    return Line("ten forks of a session with 200 MB", "≤ 5 s", f"{seconds:.1f} s", seconds <= 5)


def with_packages() -> Iterator[Line]:
    """Sessions with a package of one module, whose wheel is on this host."""
    index = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    settings = {
        **SMALLEST_IMAGE, **only_from(index), "FUMEHOOD_PACKAGES__ALLOW": '["*"]',
        "FUMEHOOD_CONTAINER__POOL_MIN": "0",
    }  # fmt: skip
    first_s, second_s, without_s = [], [], []
    with run_daemon(settings) as daemon, Client(daemon.socket) as client:

        def new(packages: list[str]) -> float:
            begun = time.monotonic()
            made = client.create_session(packages=packages, memory_mb=128)
            seconds = time.monotonic() - begun
            client.end_session(made.id)
            return seconds

        for number in range(ROUNDS):
            write_wheel(index, f"bench{time.time_ns()}_{number}")
            name = max(index.glob("*.whl")).name.partition("-")[0]
            first_s.append(new([name]))
            second_s.append(new([name]))
            without_s.append(new([]))
    shutil.rmtree(index, ignore_errors=True)
    first = statistics.median(first_s)
    more_ms = (statistics.median(second_s) - statistics.median(without_s)) * 1e3
    yield Line(
        "image python: new session with a package, first use",
        "≤ 3 s", f"{first:.2f} s", first <= 3,
    )  # fmt: skip
    yield Line(
        "image python: new session with a package, second use: more than without",
        "≤ 50 ms", f"{more_ms:.0f} ms", more_ms <= 50,
    )  # fmt: skip


def many_stopped() -> Iterator[Line]:
    """Sessions that only have a disk."""
    settings = {
        **SMALLEST_IMAGE, "FUMEHOOD_SESSIONS__MAX_DISKS": str(2 * STOPPED + 2),
        "FUMEHOOD_CONTAINER__POOL_MIN": "0",
    }  # fmt: skip
    with run_daemon(settings) as daemon, Client(daemon.socket) as client:
        first = client.create_session(memory_mb=128, disk_mb=16).id
        client.stop_session(first)
        before_mb = psutil.Process(daemon.process.pid).memory_info().rss / 1e6
        for _ in range(STOPPED // 50):
            client.fork_session(first, count=50)
        more_mb = psutil.Process(daemon.process.pid).memory_info().rss / 1e6 - before_mb
        get = bare_client(daemon.socket, "/v1/sessions", None, "GET")
        listing_ms = statistics.median(timed(get) for _ in range(CALLS)) * 1e3
        held = client.request("GET", "/v1/sessions").data["items"]
        running = sum(one["state"] != "stopped" for one in held)
        for one in held:
            client.end_session(one["id"])
    yield Line(
        f"listing {STOPPED} stopped sessions",
        "≤ 20 ms", f"{listing_ms:.1f} ms", listing_ms <= 20,
    )  # fmt: skip
    yield Line(
        f"{STOPPED} stopped sessions: containers, and memory of the daemon for each",
        "0; ≤ 64 KB", f"{running}; {more_mb / STOPPED * 1e3:.0f} KB",
        running == 0 and more_mb / STOPPED * 1e3 <= 64,
    )  # fmt: skip


def taken_over() -> Line:
    """From when the next daemon listens until each session has answered a call."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    settings = {
        **SMALLEST_IMAGE, "FUMEHOOD_HOME": str(home), "FUMEHOOD_SESSIONS__MAX": str(MANY),
        "FUMEHOOD_SESSIONS__MAX_PER_PRINCIPAL": str(MANY), "FUMEHOOD_CONTAINER__POOL_MIN": "0",
    }  # fmt: skip
    with (
        run_daemon(settings, socket=home / "engine.sock") as daemon,
        Client(daemon.socket) as client,
    ):
        sessions = [client.create_session(memory_mb=128).id for _ in range(MANY)]
        for session in sessions:
            client.call("run_python", {"code": f"x = {session!r}"}, session_id=session)
        daemon.process.kill()
        daemon.process.wait()
    with run_daemon(settings, socket=home / "engine.sock") as daemon:
        begun = time.monotonic()
        answers: list[object] = []
        threads = [
            threading.Thread(target=lambda one=one: answers.append(value_in(daemon, one) == one))
            for one in sessions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begun
        with Client(daemon.socket) as client:
            for session in sessions:
                client.end_session(session)
    shutil.rmtree(home, ignore_errors=True)
    if answers != [True] * MANY:
        raise RuntimeError(f"{answers.count(True)} of {MANY} sessions have their variable")
    return Line(
        f"image python: {MANY} sessions after kill -9, until each has answered a call",
        "≤ 3 s", f"{seconds:.1f} s", seconds <= 3,
    )  # fmt: skip


def value_in(daemon: Running, session: str) -> object:
    body = {"arguments": {"code": "x"}, "options": {"session_id": session}}
    answer = json.loads(bare_client(daemon.socket, PATH, json.dumps(body).encode())())
    return answer["data"].get("value")
