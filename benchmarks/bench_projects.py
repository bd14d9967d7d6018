"""Projects in sessions, processes beside calls, and ports."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench_containers import image_id, standing_container, timed
from benchmarks.bench_daemon import Running, run_daemon
from benchmarks.line import Line
from fumehood import Engine
from fumehood.approvals.model import ApprovalQuery
from fumehood.client import Client
from fumehood.config import Config
from fumehood.storage.database import open_database
from support.asking import ALICE, YES, add_approvers

FILES, FILE_BYTES, CHANGED = 10_000, 20_000, 100
ROUNDS = 3
CALLS = 60
IDLE = 16
REQUESTS = 200
BIG_BYTES = 100 << 20
DISK_MB = 1024

CHANGE = "for n in $(seq 0 99); do echo more >> d$n/f${n}00.txt; done"
SERVER = f"""
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b"x" * ({BIG_BYTES} if self.path == "/big" else 10)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def project_lines() -> Iterator[Line]:
    with _project() as project:
        yield from asyncio.run(_copied(project))
    with run_daemon() as daemon:
        yield _started(daemon)
        yield _beside(daemon)
        yield from _ports(daemon)


@contextmanager
def _project() -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="fh-project-", dir="/tmp"))
    for number in range(FILES):
        directory = top / f"d{number // 100}"
        directory.mkdir(exist_ok=True)
        line = f"line of file {number}\n".encode()
        (directory / f"f{number}.txt").write_bytes((line * FILE_BYTES)[:FILE_BYTES])
    (top / ".gitignore").write_text("node_modules/\n*.log\n")
    try:
        yield top
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _copy(project: Path) -> float:
    with tempfile.TemporaryDirectory(dir="/tmp") as other:
        command = ["cp", "-r", str(project), f"{other}/copy"]
        return timed(lambda: subprocess.run(command, check=True))


async def _copied(project: Path) -> list[Line]:
    """In turn with `cp -r`; both read what is in the page cache."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    database = open_database(home / "state.db")
    copy_s, from_s, diff_s, apply_s = [], [], [], []
    try:
        async with Engine(config=Config(home=home), database=database) as engine:
            await add_approvers(engine)
            claim = engine.projects.claim(str(project), proven=True).id
            for _ in range(ROUNDS):
                copy_s.append(_copy(project))
                begun = time.monotonic()
                session = await engine.projects.create(engine.owner, project=claim, disk_mb=DISK_MB)
                from_s.append(time.monotonic() - begun)
                await engine.call("run_shell", {"command": CHANGE}, session_id=session.id)
                begun = time.monotonic()
                found = await engine.projects.difference(engine.owner, session.id)
                diff_s.append(time.monotonic() - begun)
                assert len(found["files"]) == CHANGED
                apply_s.append(await _applied(engine, session.id))
                await engine.sessions.end(engine.owner, session.id)
    finally:
        database.close()
        shutil.rmtree(home, ignore_errors=True)
    whole_s, cp_s = statistics.median(from_s), statistics.median(copy_s)
    ratio = whole_s / cp_s
    diff, apply = statistics.median(diff_s), statistics.median(apply_s)
    return [
        Line(
            "new session from a project of 10,000 files, 200 MB / cp -r",
            "≤ 5, ≤ 3 s", f"{ratio:.1f} ({whole_s:.2f} s / {cp_s:.2f} s)",
            ratio <= 5 and whole_s <= 3,
        ),
        Line("diff of it, 100 files changed", "≤ 1 s", f"{diff:.2f} s", diff <= 1),
        Line("apply of 100 files, from the yes", "≤ 0.5 s", f"{apply:.2f} s", apply <= 0.5),
    ]  # fmt: skip


async def _applied(engine: Engine, session: str) -> float:
    calling = asyncio.ensure_future(
        engine.call("apply_workspace", {}, session_id=session, wait_for_approval=60)
    )
    while not (found := (await engine.approvals.list(ApprovalQuery(state="pending"))).items):
        await asyncio.sleep(0.01)
    begun = time.monotonic()
    await engine.approvals.decide(found[0].id, YES, ALICE, channel="bench")
    answer = await calling
    taken = time.monotonic() - begun
    assert answer.success, answer.error
    return taken


def _start(client: Client, session: str, name: str, *argv: str) -> None:
    arguments = {"name": name, "argv": list(argv)}
    client.call("start_process", arguments, session_id=session).raise_for_error()


def _started(daemon: Running) -> Line:
    """A start through the daemon, as a whole call, against `docker exec` of the same program."""
    start_s, exec_s = [], []
    with Client(daemon.socket) as client, standing_container(image_id("python-data")) as standing:
        session = client.create_session().id
        for number in range(IDLE):
            name = f"p{number}"
            start_s.append(timed(lambda name=name: _start(client, session, name, "sleep", "600")))
            exec_s.append(timed(lambda: _exec(standing)))
        client.end_session(session)
    start_ms, exec_ms = (statistics.median(taken) * 1e3 for taken in (start_s, exec_s))
    ratio = start_ms / exec_ms
    return Line(
        "start of a process / docker exec -d",
        "≤ 0.3", f"{ratio:.2f} ({start_ms:.1f} ms / {exec_ms:.1f} ms)", ratio <= 0.3,
    )  # fmt: skip


def _exec(container: str) -> None:
    subprocess.run(["docker", "exec", "-d", container, "sleep", "600"], check=True, timeout=60)


def _beside(daemon: Running) -> Line:
    """Calls in two sessions in turn, of which one has 16 idle processes."""
    beside_s, alone_s = [], []
    with Client(daemon.socket) as client:
        sessions = [client.create_session().id for _ in range(2)]
        for number in range(IDLE):
            _start(client, sessions[0], f"p{number}", "sleep", "600")
        for session in sessions:
            client.call("run_python", {"code": "0"}, session_id=session)
        for _ in range(CALLS):
            for session, taken in zip(sessions, (beside_s, alone_s), strict=True):
                taken.append(timed(lambda s=session: _call(client, s)))
        for session in sessions:
            client.end_session(session)
    beside_ms, alone_ms = (statistics.median(taken) * 1e3 for taken in (beside_s, alone_s))
    ratio = beside_ms / alone_ms
    return Line(
        "call beside 16 idle processes / without",
        "≤ 1.1", f"{ratio:.2f} ({beside_ms:.1f} ms / {alone_ms:.1f} ms)", ratio <= 1.1,
    )  # fmt: skip


def _call(client: Client, session: str) -> None:
    client.call("run_python", {"code": "0"}, session_id=session)


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def _get(connect: Callable[[], http.client.HTTPConnection], path: str) -> int:
    connection = connect()
    connection.request("GET", path)
    size = 0
    answer = connection.getresponse()
    while piece := answer.read(1 << 20):
        size += len(piece)
    connection.close()
    return size


def _ports(daemon: Running) -> Iterator[Line]:
    """Requests on new connections in turn: through the port, and to the same server here."""
    space: dict[str, object] = {"__name__": "bench"}
    code = SERVER.replace("(('127.0.0.1', 8000)", "(('127.0.0.1', 0)")
    exec(code.rpartition("\n\n")[0], space)
    here = http.server.ThreadingHTTPServer(("127.0.0.1", 0), space["Handler"])  # type: ignore[arg-type]
    threading.Thread(target=here.serve_forever, daemon=True).start()
    through_s, direct_s = [], []
    with Client(daemon.socket) as client:
        session = client.create_session(memory_mb=1024).id
        _start(client, session, "web", "python3", "-c", SERVER)
        client.call("run_python", {"code": "import time; time.sleep(1)"}, session_id=session)
        prefix = f"/v1/sessions/{session}/ports/8000"
        for _ in range(REQUESTS):
            through_s.append(timed(lambda: _get(lambda: _Unix(daemon.socket), f"{prefix}/")))
            direct_s.append(
                timed(
                    lambda: _get(
                        lambda: http.client.HTTPConnection("127.0.0.1", here.server_port), "/"
                    )
                )
            )
        big_s = timed(lambda: _get(lambda: _Unix(daemon.socket), f"{prefix}/big"))
        client.end_session(session)
    here.shutdown()
    more_ms = (statistics.median(through_s) - statistics.median(direct_s)) * 1e3
    yield Line(
        "request to a port of a session: more than the same on loopback",
        "≤ 3 ms", f"{more_ms:.2f} ms", more_ms <= 3,
    )  # fmt: skip
    rate = BIG_BYTES / (1 << 20) / big_s
    yield Line("100 MB from a port of a session", "≥ 20 MB/s", f"{rate:.0f} MB/s", rate >= 20)
