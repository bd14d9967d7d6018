"""Processes and ports of a session, as its owner uses them: tools, HTTP, the command line."""

from __future__ import annotations

import base64
import http.client
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, running_daemon
from fumehood import Client
from fumehood.protocol.framing import MAX_PORT_CONNECTIONS
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image")]

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/big":
            body = b"x" * 20_000_000
        else:
            told = [f"{self.command} {self.path}"]
            told += [f"{name}: {value}" for name, value in self.headers.items()]
            body = "\\n".join(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(201)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""

ECHO = """
import socket, threading

def serve(one):
    while data := one.recv(65536):
        one.sendall(data)
    one.close()

listener = socket.create_server(("127.0.0.1", 7000))
while True:
    threading.Thread(target=serve, args=[listener.accept()[0]]).start()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    images = dict.fromkeys(("container__images__python", "container__images__shell"), "python")
    with running_daemon(**images) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


@pytest.fixture(scope="module")
def session(client: Client) -> Iterator[str]:
    made = client.create_session(image="python")
    started(client, made.id, "web", SERVER)
    started(client, made.id, "echo", ECHO)
    for port in (8000, 7000):
        until_it_listens(client, made.id, port)
    yield made.id
    client.end_session(made.id)


def started(client: Client, session: str, name: str, code: str, **more: Any) -> None:
    arguments = {"name": name, "argv": ["python3", "-u", "-c", code], **more}
    answer = client.call("start_process", arguments, session_id=session)
    assert answer.success, answer.error
    assert answer.data["process"]["state"] == "running"


def until_it_listens(client: Client, session: str, port: int) -> None:
    code = f"""
import socket, time
for _ in range(500):
    try:
        socket.create_connection(("127.0.0.1", {port})).close()
        break
    except OSError:
        time.sleep(0.05)
"""
    assert client.call("run_python", {"code": code}, session_id=session).success


class PortConnection(http.client.HTTPConnection):
    """Requests over the callers' socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=600)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self.path))


def fetched(
    daemon: Daemon, session: str, path: str, method: str = "GET", port: int = 8000, **more: Any
) -> tuple[int, bytes]:
    with closing(PortConnection(daemon.socket)) as connection:
        connection.request(method, f"/v1/sessions/{session}/ports/{port}{path}", **more)
        answer = connection.getresponse()
        return answer.status, answer.read()


# -- ports -----------------------------------------------------------------------------------


def test_request_reaches_the_server_without_the_callers_credential(
    daemon: Daemon, session: str
) -> None:
    with Client(daemon.socket) as client:
        assert client.session(session).id == session
    headers = {"X-Mine": "yes", "Cookie": "a=b"}
    status, body = fetched(daemon, session, "/a%20b?c=d", headers=headers)
    told = body.decode().lower().splitlines()
    assert status == 200
    assert told[0] == "get /a%20b?c=d"
    assert {"x-mine: yes", "cookie: a=b", "connection: close"} <= set(told)
    assert not any("authorization" in line for line in told)


def test_escaped_slash_of_a_path_is_a_slash(daemon: Daemon, session: str) -> None:
    """As generated clients write it. In the query and behind another escape it stays."""
    for path, expected in (
        ("/a%2Fb%2fc?d=%2F", "/a/b/c?d=%2F"), ("/a%252Fb", "/a%252Fb"), ("/%2e%2e", "/%2e%2e"),
    ):  # fmt: skip
        _, body = fetched(daemon, session, path)
        assert body.decode().splitlines()[0] == f"GET {expected}"


def test_bodies_pass_in_both_directions(daemon: Daemon, session: str) -> None:
    status, body = fetched(daemon, session, "/post", "POST", body=b"abc" * 100_000)
    assert (status, body) == (201, b"cba" * 100_000)
    status, body = fetched(daemon, session, "/big")
    assert (status, len(body)) == (200, 20_000_000)


def test_connection_serves_no_other_request_of_the_api(daemon: Daemon, session: str) -> None:
    address = f"/v1/sessions/{session}/ports/8000/one"
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(20)
        raw.connect(str(daemon.socket))
        raw.sendall(
            f"GET {address} HTTP/1.1\r\nhost: x\r\n\r\n"
            "GET /v1/sessions HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        )
        received = b""
        while piece := raw.recv(65536):
            received += piece
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"GET /one" in received
    assert b"sess_" not in received.partition(b"\r\n\r\n")[2].replace(session.encode(), b"")


def test_upgrade_passes_bytes_of_any_protocol(daemon: Daemon, session: str) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(20)
        raw.connect(str(daemon.socket))
        head = f"POST /v1/sessions/{session}/ports/7000 HTTP/1.1\r\nhost: x\r\n"
        raw.sendall(f"{head}connection: Upgrade\r\nupgrade: tcp\r\n\r\n".encode() + b"first\0")
        received = b""
        while not received.endswith(b"first\0"):
            received += raw.recv(65536)
        assert received.startswith(b"HTTP/1.1 101 ")
        raw.sendall(b"second\xff")
        assert raw.recv(100) == b"second\xff"


def test_websocket_handshake_is_the_servers_own(daemon: Daemon, session: str) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    headers = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": key,
        "Sec-WebSocket-Version": "13",
    }  # fmt: skip
    status, body = fetched(daemon, session, "/ws", headers=headers)
    assert status == 200  # this server knows no WebSocket, and says what it got
    assert {"upgrade: websocket", f"sec-websocket-key: {key}".lower()} <= set(
        body.decode().lower().splitlines()
    )


@pytest.mark.parametrize(
    ("port", "status", "code"),
    [(9, 502, "NETWORK_ERROR"), (0, 422, "INVALID_PARAMS"), (3128, 422, "INVALID_PARAMS"),
     (65536, 422, "INVALID_PARAMS")],
)  # fmt: skip
def test_port_without_a_server_is_an_error(
    daemon: Daemon, session: str, port: int, status: int, code: str
) -> None:
    found, body = fetched(daemon, session, "/", port=port)
    assert code.encode() in body
    assert found >= 400


def test_session_of_nobody_has_no_ports(daemon: Daemon) -> None:
    status, body = fetched(daemon, "sess_" + "0" * 32, "/")
    assert status == 404
    assert b"RESOURCE_NOT_FOUND" in body


def test_server_that_never_answers_holds_nothing_else(
    daemon: Daemon, client: Client, session: str
) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(daemon.socket))
        head = f"GET /v1/sessions/{session}/ports/7000/x HTTP/1.1\r\nhost: x\r\n\r\n"
        raw.sendall(head.encode())
        assert b"GET /x" in raw.recv(100)  # the echo, and then nothing
        assert client.call("run_python", {"code": "1"}, session_id=session).success
        assert fetched(daemon, session, "/")[0] == 200


DEAF = """
import socket, time

listener = socket.create_server(("127.0.0.1", 7001))
held = []
while True:
    held.append(listener.accept()[0])
"""


def test_callers_that_are_gone_hold_no_connection(
    daemon: Daemon, client: Client, session: str
) -> None:
    started(client, session, "deaf", DEAF)
    until_it_listens(client, session, 7001)
    head = f"POST /v1/sessions/{session}/ports/7001 HTTP/1.1\r\nhost: x\r\n"

    def is_connected() -> bool:
        """Connect once, and leave. A busy daemon notices later that a caller has left."""
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(20)
            raw.connect(str(daemon.socket))
            raw.sendall(f"{head}connection: Upgrade\r\nupgrade: tcp\r\n\r\n".encode())
            return b" 101 " in raw.recv(100)

    for _ in range(MAX_PORT_CONNECTIONS + 4):
        wait_until(is_connected)
    client.stop_process(session, "deaf", grace_s=0)


# -- the command line ------------------------------------------------------------------------


@pytest.fixture
def forwarding(daemon: Daemon, session: str) -> Iterator[Any]:
    running: list[subprocess.Popen[str]] = []

    def forward(*options: str) -> str:
        running.append(
            subprocess.Popen(
                [str(FUMEHOOD), "sessions", "port", session, *options],
                env=daemon.environment, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        assert running[-1].stdout is not None
        return running[-1].stdout.readline().strip()

    yield forward
    for one in running:
        one.send_signal(signal.SIGTERM)
        one.wait(timeout=DEADLINE_S)
        assert one.stdout is not None
        one.stdout.close()


def requested(port: int, host: str, path: str = "/") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_link_is_an_origin_of_its_own_and_nothing_else_answers(forwarding: Any) -> None:
    link = re.fullmatch(r"http://([0-9a-f]{16}\.localhost):(\d+)/", forwarding("8000"))
    assert link is not None
    host, port = f"{link[1]}:{link[2]}", int(link[2])
    status, body = requested(port, host, "/page")
    assert (status, body.splitlines()[0]) == (200, b"GET /page")
    for other in (f"127.0.0.1:{port}", f"localhost:{port}", f"x{host}", f"{'0' * 16}.localhost"):
        status, body = requested(port, other)
        assert (status, b"GET /" in body) == (403, False)


def test_tcp_forwarding_passes_bytes(forwarding: Any) -> None:
    host, _, port = forwarding("7000", "--tcp").partition(":")
    with socket.create_connection((host, int(port)), timeout=600) as raw:
        raw.sendall(b"\0bytes")
        assert raw.recv(100) == b"\0bytes"


def test_forwarding_ends_after_its_time(daemon: Daemon, session: str) -> None:
    command = [str(FUMEHOOD), "sessions", "port", session, "8000", "--for", "0.2"]
    done = subprocess.run(command, env=daemon.environment, timeout=600, capture_output=True)
    assert done.returncode == 0


# -- processes -------------------------------------------------------------------------------


def test_output_can_be_followed(client: Client, session: str) -> None:
    code = "import time\nfor n in range(4): print('line', n); time.sleep(0.3)"
    started(client, session, "counter", code)
    text, offset, looks = "", 0, 0
    while True:
        piece = client.process_output(session, "counter", after=offset, wait_seconds=10)
        text, offset, looks = text + piece.text, piece.offset or offset, looks + 1
        if piece.ended and not piece.text:
            break
    assert text == "line 0\nline 1\nline 2\nline 3\n"
    assert 3 <= looks <= 8
    shown = client.process(session, "counter")
    assert (shown.state, shown.exit_code) == ("ended", 0)


def test_model_can_do_all_with_tools(client: Client, session: str) -> None:
    code = "for line in iter(input, 'end'): print(line.upper())"
    started(client, session, "shouter", code, env=[{"name": "A", "value": "b"}])

    def call(tool: str, **arguments: Any) -> Any:
        answer = client.call(tool, arguments, session_id=session)
        assert answer.success, answer.error
        return answer.data

    call("write_process", name="shouter", text="hello\n")
    wait_until(lambda: call("read_process", name="shouter")["text"].endswith("\n"))
    read = call("read_process", name="shouter")
    assert (read["text"], read["offset"], read["ended"]) == ("HELLO\n", 6, False)
    names = {one["name"]: one["state"] for one in call("list_processes")["processes"]}
    assert names["shouter"] == "running"
    ended = call("stop_process", name="shouter")["process"]
    assert (ended["state"], ended["signal"]) == ("ended", 15)


def test_trial_is_refused_beside_processes(client: Client) -> None:
    made = client.create_session(image="python", durable=True)
    started(client, made.id, "sleeper", "import time; time.sleep(600)")
    answer = client.call("run_python", {"code": "1"}, session_id=made.id, preview=True)
    assert answer.error is not None
    assert "Stop them first" in answer.error.message
    client.end_session(made.id)


def test_process_starts_again_with_its_session(client: Client) -> None:
    made = client.create_session(image="python", disk_mb=64)
    started(client, made.id, "kept", ECHO, restart=True)
    started(client, made.id, "lost", "import time; time.sleep(600)")
    client.stop_session(made.id)
    assert [(one.name, one.state) for one in client.processes(made.id)] == [("kept", "ended")]
    client.resume_session(made.id)
    assert [(one.name, one.state) for one in client.processes(made.id)] == [("kept", "running")]
    client.stop_process(made.id, "kept")
    client.stop_session(made.id)
    client.resume_session(made.id)
    assert client.processes(made.id) == ()
    client.end_session(made.id)


def run_process(client: Client, session: str, name: str, command: str, **more: Any) -> str | None:
    arguments = {"name": name, "command": command, **more}
    answer = client.call("start_process", arguments, session_id=session)
    return answer.error.message if answer.error is not None else None


def test_process_that_would_start_again_is_listed_and_stopped_however_long_it_has_ended(
    client: Client,
) -> None:
    made = client.create_session(image="python", disk_mb=64)
    command = "test -e go && exec sleep 600; exit 0"
    assert run_process(client, made.id, "hidden", command, restart=True) is None
    for number in range(17):
        assert run_process(client, made.id, f"q{number}", "true") is None
    assert client.processes(made.id)[0].name == "hidden"
    assert client.stop_process(made.id, "hidden").state == "ended"
    wait_until(lambda: "hidden" not in {one.name for one in client.processes(made.id)})
    client.call("run_shell", {"command": "touch go"}, session_id=made.id).raise_for_error()
    client.stop_session(made.id)
    client.resume_session(made.id)
    assert client.processes(made.id) == ()
    client.end_session(made.id)


def test_processes_that_start_again_are_few_and_small(client: Client) -> None:
    made = client.create_session(image="python", disk_mb=64)
    for number in range(16):
        assert run_process(client, made.id, f"p{number}", "true", restart=True) is None
    refusal = run_process(client, made.id, "p16", "true", restart=True)
    assert refusal is not None
    assert "processes with restart" in refusal
    assert run_process(client, made.id, "p1", "true", restart=True) is None
    refusal = run_process(client, made.id, "p0", "true #" + "x" * 300_000, restart=True)
    assert refusal is not None
    assert "256 KB" in refusal
    assert run_process(client, made.id, "p0", "true") is None
    assert run_process(client, made.id, "p16", "true", restart=True) is None
    client.end_session(made.id)


def test_session_is_thawed_for_a_request_to_its_port(
    daemon: Daemon, client: Client, session: str
) -> None:
    assert client.pause_session(session).state == "paused"
    assert fetched(daemon, session, "/")[0] == 200
    assert client.session(session).state == "active"


def test_rules_about_commands_hold_for_processes(start_daemon: StartDaemon, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nid = "no-shell"\ndecision = "deny"\ntools = ["run_shell"]\n')
    images = dict.fromkeys(("container__images__python", "container__images__shell"), "python")
    daemon = start_daemon(policy_file=str(policy), **images)
    with Client(daemon.socket) as client:
        made = client.create_session(image="python")
        arguments = {"name": "x", "command": "sleep 600"}
        answer = client.call("start_process", arguments, session_id=made.id)
        assert answer.error is not None
        assert answer.error.code == "PERMISSION_DENIED"
        assert client.processes(made.id) == ()
        client.end_session(made.id)
