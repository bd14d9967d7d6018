"""Tools of MCP servers: real ones of both protocol eras and hostile ones, over stdio and HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import psutil
import pytest

from conftest import Daemon, StartDaemon
from fumehood import Client, Config, Engine, FumehoodError, ToolType
from fumehood.approvals.model import NewDecision, RememberWish
from fumehood.core.envelope import Envelope
from fumehood.mcp.client import servers as client
from fumehood.mcp.client import wire as mcp_wire
from fumehood.mcp.client.in_engine import McpClient
from fumehood.pipeline.incoming import parse_own_call
from fumehood.sandbox import wall
from support.answers import code_of, error_of
from support.asking import CALLER, asking
from support.recording import RecordingLog
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.row("D3", "R4")]

UPSTREAMS = Path(__file__).parents[1] / "support" / "mcp_upstream"
TESTER = [sys.executable, str(UPSTREAMS / "tester.py")]
SCRIPTED = [sys.executable, "-S", str(UPSTREAMS / "scripted.py")]
EVERY = (
    "add", "say", "variable", "fail", "draw", "count", "wait", "big", "die", "grow", "grown", "echo",
)  # fmt: skip


def server(command: list[str], *more: str, **fields: Any) -> dict[str, Any]:
    return {"command": [*command, *more], "place": "host", "harmless": EVERY, **fields}


@asynccontextmanager
async def serving(*, count: int = 1, settings: Any = None, **servers: Any) -> AsyncIterator[Engine]:
    """An engine, once `count` of its servers have listed their tools."""
    config = Config(mcp_servers=servers, **(settings or {}))
    async with Engine(config=config) as engine:
        with anyio.fail_after(DEADLINE_S):
            while len({name.partition("__")[0] for name in names(engine)}) < count:
                await anyio.sleep(0.01)
        yield engine


def server_of(engine: Engine, name: str) -> Any:
    """The engine's side of a configured server."""
    return engine.part(McpClient).servers[name]


def names(engine: Engine) -> list[str]:
    return [tool.name for tool in engine.tools() if tool.type == ToolType.MCP]


async def until(condition: Any) -> None:
    with anyio.fail_after(DEADLINE_S):
        while not condition():
            await anyio.sleep(0.01)


def speak_the_older_era(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the probe for the newer protocol, so that the engine uses the handshake."""
    negotiate = mcp_wire.Wire.negotiate
    monkeypatch.setattr(
        mcp_wire.Wire, "negotiate", lambda wire, skip_probe: negotiate(wire, skip_probe=True)
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """URL of the real server over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*TESTER, "http", str(port)], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.parametrize("kind", ["stdio", "http", "http-old"])
async def test_real_mcp_servers_tools_are_callable_in_both_eras_over_stdio_and_http(
    kind: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = kind.endswith("old")
    if old:
        speak_the_older_era(monkeypatch)
    web = {"url": address, "harmless": EVERY}
    settings = {"rest": {"allowed_hosts": [address.split("/")[2]]}}
    one = web if kind.startswith("http") else server(TESTER)
    async with serving(settings=settings, tester=one) as engine:
        await until(lambda: server_of(engine, "tester")._wire is not None)
        wire = server_of(engine, "tester")._wire
        assert wire is not None
        assert wire.version == (mcp_wire.HANDSHAKE[0] if old else mcp_wire.MODERN)
        added = await engine.call("tester__add", {"a": 1, "b": 2})
        assert added.data == {"result": 3}
        drawn = await engine.call("tester__draw")
        (figure,) = drawn.files
        assert figure.content_type == "image/png"
        failed = await engine.call("tester__fail")
        assert code_of(failed) == "EXECUTION_ERROR"
        big = await engine.call("tester__big", {"size": 3_000_000})
        assert code_of(big) == "OUTPUT_LIMIT_EXCEEDED"
        events = [event async for event in engine.stream("tester__count", {"to": 4})]
        reports = [event for event in events if event.type == "tool_progress"]
        if not old or kind == "stdio-old":
            assert [event.progress for event in reports][-4:] == [25.0, 50.0, 75.0, 100.0]


async def test_tool_list_change_notification_updates_the_registry() -> None:
    async with serving(tester=server(TESTER)) as engine:
        assert "tester__grown" not in names(engine)
        await engine.call("tester__grow")
        await until(lambda: "tester__grown" in names(engine))
        assert (await engine.call("tester__grown")).data == {"result": "grown"}


async def test_dead_server_is_restarted_and_its_tools_stay_listed() -> None:
    async with serving(tester=server(SCRIPTED, "dies")) as engine:
        died = await engine.call("tester__echo", {"text": "a"})
        assert (code_of(died), error_of(died).retryable) == ("NETWORK_ERROR", False)
        assert "tester__echo" in names(engine)
        await until(lambda: server_of(engine, "tester")._wire is None)
        refused = await engine.call("tester__echo", {"text": "a"})
        assert (code_of(refused), error_of(refused).retryable) == (
            "SANDBOX_UNAVAILABLE",
            True,
        )
        await until(lambda: server_of(engine, "tester")._wire is not None)


async def test_malformed_answer_fails_only_its_own_call() -> None:
    codes = {
        "good": "OK", "foreign": "OK", "nonsense": "EXECUTION_ERROR",
        "neither": "EXECUTION_ERROR", "not-json": "EXECUTION_ERROR", "asks-much": "OK",
        "nils": "OK",
    }  # fmt: skip
    servers = {mode.replace("-", "_"): server(SCRIPTED, mode) for mode in codes}
    async with serving(count=len(codes), **servers) as engine:
        for name, code in zip(servers, codes.values(), strict=True):
            for _ in range(2):
                answer = await engine.call(f"{name}__echo", {"text": "a"})
                assert code_of(answer) == code, name


async def test_nils_in_a_list_and_a_malformed_part_lose_nothing_else() -> None:
    async with serving(tester=server(SCRIPTED, "nils")) as engine:
        assert names(engine) == ["tester__echo", "tester__none"]
        parameters = engine.tool("tester__echo").tool.parameters
        assert parameters["properties"] == {"text": {"type": "string"}}
        assert "required" not in parameters
        answer = await engine.call("tester__echo", {"text": "a"})
        assert (answer.success, answer.data) == (True, {"text": "a"})
        (warning,) = answer.metadata.warnings
        assert warning.startswith("Part 2 of the MCP server's result was left out")


async def test_oversized_answer_fails_its_call_in_little_memory() -> None:
    async with serving(tester=server(SCRIPTED, "huge", "8")) as engine:
        for _ in range(2):  # the same server goes on
            answer = await engine.call("tester__echo")
            assert code_of(answer) == "OUTPUT_LIMIT_EXCEEDED"
    async with serving(tester=server(SCRIPTED, "huge", "100")) as engine:
        before = psutil.Process().memory_info().rss
        answer = await engine.call("tester__echo")
        assert code_of(answer) == "OUTPUT_LIMIT_EXCEEDED"
        assert psutil.Process().memory_info().rss - before < 60 << 20


async def test_unanswered_call_times_out_and_notifies_the_server(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    async with serving(tester=server(SCRIPTED, "hangs", str(note))) as engine:
        answer = await engine.call("tester__echo", timeout_seconds=0.3)
        assert code_of(answer) == "TIMEOUT"
        await until(lambda: note.exists() and "requestId" in note.read_text())


@pytest.mark.parametrize("kind", ["stdio", "http", "http-old"])
async def test_cancelled_call_is_cancelled_at_the_server(
    kind: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    if kind == "http-old":
        speak_the_older_era(monkeypatch)
    web = {"url": address, "harmless": EVERY}
    settings = {"rest": {"allowed_hosts": [address.split("/")[2]]}}
    one, tool, arguments, told = (
        (web, "tester__wait", {"marker": str(note)}, "cancelled")
        if kind.startswith("http")
        else (server(SCRIPTED, "hangs", str(note)), "tester__echo", {}, "requestId")
    )
    async with serving(settings=settings, tester=one) as engine:
        call = asyncio.ensure_future(engine.call(tool, arguments))
        await until(lambda: note.exists() and note.read_text() == "began")
        call.cancel()
        await asyncio.wait({call})
        await until(lambda: told in note.read_text())


@pytest.mark.parametrize("mode", ["garbage", "silent"])
async def test_server_not_speaking_mcp_is_retried_and_lists_no_tools(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_wire, "PROBE_S", 0.1)
    monkeypatch.setattr(client, "GREETING_S", 0.3)
    config = Config(mcp_servers={"bad": server(SCRIPTED, mode), "good": server(SCRIPTED)})
    tries: list[int] = []
    start = mcp_wire.HostProgram.start

    async def count_starts(*given: Any) -> Any:
        started = await start(*given)
        tries.append(started._process.pid)
        return started

    monkeypatch.setattr(mcp_wire.HostProgram, "start", count_starts)
    async with Engine(config=config) as engine:
        await until(lambda: names(engine) == ["good__echo"] and len(tries) >= 3)
    assert not any(psutil.pid_exists(pid) for pid in tries)


async def test_host_program_starts_in_the_root_directory() -> None:
    """`npx` and `python -m` would run code planted there."""
    assert os.getcwd() != "/"
    program = await mcp_wire.HostProgram.start(("/bin/pwd",), {})
    assert await program.read() == b"/\n"
    await program.stop()


async def test_server_that_reads_the_probe_late_is_reached_in_the_newer_era(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe read late switches the server to the newer era, which refuses the handshake."""
    monkeypatch.setattr(mcp_wire, "PROBE_S", 0.01)
    send = mcp_wire.StreamWire.send

    async def patient_after_the_handshake(wire: Any, request: mcp_wire.Request) -> Any:
        if request.method == "initialize":
            monkeypatch.setattr(mcp_wire, "PROBE_S", 10.0)
        return await send(wire, request)

    monkeypatch.setattr(mcp_wire.StreamWire, "send", patient_after_the_handshake)
    log = RecordingLog()
    config = Config(mcp_servers={"tester": server(TESTER)})
    async with Engine(config=config, log=log) as engine:
        await until(lambda: "tester__add" in names(engine))
        assert mcp_wire.MODERN in str(log.events)
        assert "mcp.server_lost" not in str(log.events)


@pytest.mark.parametrize("mode", ["lists-ever", "lists-large"])
async def test_endless_tool_list_is_cut_at_the_page_limit(mode: str) -> None:
    async with serving(tester=server(SCRIPTED, mode)) as engine:
        assert len(names(engine)) == client.MAX_PAGES
        assert "tester__large" not in names(engine)


async def test_server_gets_a_limited_number_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_TOOLS", 20)
    async with serving(tester=server(SCRIPTED, "lists-ever")) as engine:
        assert len(names(engine)) == 20


@pytest.mark.parametrize(("check_s", "count"), [(10.0, 3), (-1.0, 0)])
async def test_definitions_over_the_checking_time_are_left_out(
    check_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking one 120 KB definition can take seconds, and a list has room for many."""
    monkeypatch.setattr(client, "CHECK_S", check_s)
    log = RecordingLog()
    config = Config(mcp_servers={"tester": server(SCRIPTED, "collides")})
    async with Engine(config=config, log=log) as engine:
        await until(lambda: "mcp.tools_listed" in str(log.events))
        assert len(names(engine)) == count
        assert ("s of checking" in str(log.events)) is (count == 0)


async def test_oversized_tool_list_is_rejected_whole() -> None:
    config = Config(mcp_servers={"tester": server(SCRIPTED, "lists-much")})
    async with Engine(config=config) as engine:
        await until(lambda: "lists tools of over" in server_of(engine, "tester")._why)
        assert names(engine) == []


async def test_tools_with_odd_schemas_and_names_of_other_scripts_can_be_called() -> None:
    """A name that is required only, a reference at the root, and a default of another type."""
    every = ["echo", "查询", "删除", "wrong-default"]
    settings = server(SCRIPTED, "odd-schemas", harmless=every)
    async with serving(tester=settings) as engine:
        found = names(engine)
        assert found == [
            "tester_____2f9daa82", "tester_____bcd6771e", "tester__echo", "tester__wrong-default",
        ]  # fmt: skip
        for name in found:
            answer = await engine.call(name, {"text": "hello"})
            assert answer.data["text"] == "hello"
            assert answer.metadata.warnings == ()
        answer = await engine.call("tester__wrong-default", {})
        assert code_of(answer) == "OK"


async def test_server_requests_for_sampling_are_refused_and_ping_is_answered(
    tmp_path: Path,
) -> None:
    async with serving(tester=server(SCRIPTED, "asks")) as engine:
        answer = await engine.call("tester__echo")
        sampling, ping = json.loads(answer.data["text"])
        assert sampling["error"]["code"] == -32601
        assert ping["result"] == {}


async def test_equal_tool_names_of_two_servers_coexist_and_collisions_are_left_out() -> None:
    one = server(SCRIPTED, "collides", harmless=["x" * 120])
    servers = {"one": one, "two": server(SCRIPTED)}
    async with serving(count=2, **servers) as engine:
        found = names(engine)
        assert {"one__echo", "two__echo", "one__a_b"} <= set(found)
        assert found.count("one__a_b") == 1
        assert not any("broken" in name for name in found)
        (long,) = [name for name in found if "xxx" in name]
        assert len(long) == 64
        assert (await engine.call(long, {"text": "long"})).data == {"text": "long"}


async def test_poisoned_description_is_flagged_and_makes_the_tool_dangerous() -> None:
    async with serving(tester=server(SCRIPTED, "poisons")) as engine:
        details = engine.tool("tester__echo")
        assert {finding.rule for finding in details.findings} == {"model-instructions"}
        assert details.tool.dangerous


async def test_server_gets_only_its_own_environment_and_its_credentials_are_redacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENGINES_OWN", "private")
    env = {"API_TOKEN": "canary-of-the-server-1", "MODE": "plain"}
    async with serving(tester=server(SCRIPTED, "variables", env=env)) as engine:
        shown = [
            (await engine.call("tester__echo", {"text": name})).data["text"]
            for name in ("ENGINES_OWN", "MODE", "API_TOKEN")
        ]
        assert shown == ["", "plain", "[redacted]"]


async def test_server_processes_do_not_outlive_their_engine(tmp_path: Path) -> None:
    note = tmp_path / "child"
    async with serving(tester=server(SCRIPTED, "forks", str(note))):
        child = int(note.read_text())
        assert psutil.pid_exists(child)
    await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


class PlainServer(BaseHTTPRequestHandler):
    """An older-era server that answers with JSON, keeps a session and echoes headers."""

    seen: ClassVar[list[tuple[str, str | None, str | None]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, token = asked["method"], self.headers["authorization"]
        self.seen.append((method, self.headers["mcp-session-id"], token))
        tool = {"name": "echo", "inputSchema": {"type": "object"}}
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}},
            "tools/list": {"tools": [tool]},
            "tools/call": {"content": [{"type": "text", "text": f"you sent {token}"}]},
        }
        body = b""
        if method in results:
            reply = {"jsonrpc": "2.0", "id": asked["id"], "result": results[method]}
            body = json.dumps(reply).encode()
        self.send_response(200 if body else 202 if "id" not in asked else 400)
        self.send_header("content-type", "application/json")
        self.send_header("mcp-session-id", "session-1")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


async def test_secret_header_reaches_its_server_and_is_redacted_in_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAIN_TOKEN", "canary-of-the-plain-server")
    service = ThreadingHTTPServer(("127.0.0.1", 0), PlainServer)
    thread = threading.Thread(target=service.serve_forever)
    thread.start()
    host = f"127.0.0.1:{service.server_port}"
    secret = {"env": "PLAIN_TOKEN", "tools": ["plain"], "hosts": [host]}
    settings = {"rest": {"allowed_hosts": [host]}, "secrets": {"token": secret}}
    headers = {"authorization": "Bearer ${secret:token}"}
    one = {"url": f"http://{host}/mcp", "headers": headers, "harmless": EVERY}
    PlainServer.seen.clear()
    try:
        async with serving(settings=settings, plain=one) as engine:
            answer = await engine.call("plain__echo")
            assert answer.data == {"text": "you sent Bearer [redacted]"}
    finally:
        service.shutdown()
        thread.join()
        service.server_close()
    assert {token for _, _, token in PlainServer.seen} == {"Bearer canary-of-the-plain-server"}
    sessions = {method: session for method, session, _ in PlainServer.seen}
    assert sessions["tools/call"] == "session-1"
    unbound = Config(mcp_servers={"other": one}, **settings)
    async with Engine(config=unbound) as engine:
        await until(lambda: "is not bound to the tool other" in server_of(engine, "other")._why)


async def test_remembered_rule_ends_when_the_servers_configuration_changes() -> None:
    one = server(SCRIPTED, "good", harmless=[])
    async with asking(mcp_servers={"tester": one}) as desk:
        engine = desk.engine
        await until(lambda: names(engine))

        async def ask() -> Envelope:
            name, body = parse_own_call("tester__echo", {"text": "a"}, {})
            return await engine.run(name, body, CALLER)

        first = error_of(await ask())
        assert first.approval_id is not None
        wish = RememberWish(scope="until", until=desk.clock.now() + timedelta(hours=1))
        await desk.decide(first.approval_id, NewDecision(decision="approve", remember=wish))
        await desk.ended(first.approval_id)
        assert (await ask()).success  # the twin: the same server
        mine = server_of(engine, "tester")
        mine._settings = mine._settings.model_copy(update={"command": ("/usr/bin/another",)})
        assert error_of(await ask()).code == "REQUIRES_HUMAN_APPROVAL"


class ForgetfulServer(BaseHTTPRequestHandler):
    """A server of the older era with sessions, which a test makes it forget."""

    known: ClassVar[set[str]] = set()
    begun: ClassVar[list[str]] = []
    ran: ClassVar[list[str]] = []
    refusal: ClassVar[tuple[int, Any]] = (404, None)
    forgets: ClassVar[bool] = False
    breaks_off: ClassVar[bool] = False

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, session = asked["method"], self.headers["mcp-session-id"]
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}},
            "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "done"}]},
        }
        if method == "initialize":
            assert session is None
            self.begun.append(f"session-{len(self.begun)}")
            if not self.forgets:
                self.known.add(self.begun[-1])
        elif method in results and session not in self.known:
            status, body = self.refusal
            body = (
                {**body, "id": asked["id"]} if isinstance(body, dict) and "id" not in body else body
            )
            self.answer(status, body)
            return
        if method == "tools/call":
            self.ran.append(str(session))
            if self.breaks_off:
                self.close_connection = True
                return
        if method not in results:
            self.answer(202 if "id" not in asked else 400, None)
        else:
            self.answer(200, {"jsonrpc": "2.0", "id": asked["id"], "result": results[method]})

    def answer(self, status: int, message: Any) -> None:
        body = b"" if message is None else json.dumps(message).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        if self.begun:
            begins = self.headers["mcp-session-id"] is None
            self.send_header("mcp-session-id", self.begun[-1] if begins else "one-that-is-over")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


@pytest.fixture
async def forgetful() -> AsyncIterator[tuple[Engine, type[ForgetfulServer]]]:
    """An engine with a forgetful server, and the server."""

    class Service(ForgetfulServer):
        known: ClassVar[set[str]] = set()
        begun: ClassVar[list[str]] = []
        ran: ClassVar[list[str]] = []

    service = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=service.serve_forever)
    thread.start()
    host = f"127.0.0.1:{service.server_port}"
    try:
        one = {"url": f"http://{host}/mcp", "harmless": EVERY}
        async with serving(settings={"rest": {"allowed_hosts": [host]}}, plain=one) as engine:
            await until(lambda: server_of(engine, "plain")._wire is not None)
            yield engine, Service
    finally:
        service.shutdown()
        thread.join()
        service.server_close()


NOT_FOUND = {"jsonrpc": "2.0", "error": {"code": -32001, "message": "Session not found"}}
NOT_VALID = {"error": {"code": -32000, "message": "Bad Request: No valid session ID provided"}}


@pytest.mark.parametrize(
    "refusal",
    [
        (404, None), (404, {**NOT_FOUND, "id": None}), (404, NOT_FOUND), (404, "no JSON-RPC"),
        (404, {"error": {"code": -32600, "message": "Not Found: Session has been terminated"}}),
        (400, {**NOT_VALID, "id": None}), (400, "Invalid or missing Mcp-Session-Id"), (401, "Unauthorized: Session not found"),
    ],
    ids=["empty", "no-id", "own-id", "text", "terminated", "bad-request", "invalid", "unauthorized"],
)  # fmt: skip
async def test_forgotten_session_is_begun_again_and_the_call_runs_once(
    refusal: Any, forgetful: tuple[Engine, type[ForgetfulServer]]
) -> None:
    engine, service = forgetful
    service.refusal = refusal
    service.known.clear()
    answers = await asyncio.gather(*(engine.call("plain__echo") for _ in range(5)))
    assert [answer.data for answer in answers] == [{"text": "done"}] * 5
    assert service.begun == ["session-0", "session-1"]  # one of the five began it
    assert service.ran == ["session-1"] * 5


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ((404, {"error": {"code": -32602, "message": "No such tool"}}), "EXECUTION_ERROR"),
        ((400, NOT_VALID), "EXECUTION_ERROR"),
        ((400, {"error": {"message": "no"}, "id": None}), "EXECUTION_ERROR"),
        ((400, "Paid, but the session_name of the shop's session is too long"), "EXECUTION_ERROR"),
        ((401, "Unauthorized: log in to the shop, its session has ended"), "EXECUTION_ERROR"),
        (
            (
                404,
                {"error": {"code": -32000, "message": "The terminal session has no such window"}},
            ),
            "EXECUTION_ERROR",
        ),
        ((500, "session"), "NETWORK_ERROR"),
    ],
    ids=[
        "unknown-tool",
        "own-id",
        "other-words",
        "another-session",
        "log-in",
        "terminal",
        "server-error",
    ],
)
async def test_other_refusals_of_a_server_begin_no_session(
    refusal: Any, code: str, forgetful: tuple[Engine, type[ForgetfulServer]]
) -> None:
    engine, service = forgetful
    service.refusal = refusal
    service.known.clear()
    assert code_of(await engine.call("plain__echo")) == code
    assert service.ran == []
    assert service.begun == ["session-0"]


async def test_server_that_forgets_every_session_gets_no_call(
    forgetful: tuple[Engine, type[ForgetfulServer]],
) -> None:
    engine, service = forgetful
    service.forgets = True
    service.known.clear()
    answer = await engine.call("plain__echo")
    assert (code_of(answer), error_of(answer).retryable) == ("NETWORK_ERROR", True)
    assert "ended before the call" in error_of(answer).message
    assert (service.ran, len(service.begun)) == ([], 2)
    service.forgets = False  # the twin: the next call has a session
    assert (await engine.call("plain__echo")).data == {"text": "done"}


async def test_call_that_may_have_arrived_is_not_repeated(
    forgetful: tuple[Engine, type[ForgetfulServer]],
) -> None:
    engine, service = forgetful
    service.breaks_off = True
    service.known.clear()
    answer = await engine.call("plain__echo")
    assert (code_of(answer), error_of(answer).retryable) == ("NETWORK_ERROR", False)
    assert "may or may not have taken effect" in error_of(answer).message
    assert service.ran == ["session-1"]


async def test_keyed_call_that_may_have_arrived_is_not_sent_again(
    forgetful: tuple[Engine, type[ForgetfulServer]],
) -> None:
    engine, service = forgetful
    service.breaks_off = True
    service.known.clear()
    first = await engine.call("plain__echo", idempotency_key="k")
    assert service.ran == ["session-1"]
    service.breaks_off = False
    service.known.clear()
    again = await engine.call("plain__echo", idempotency_key="k")
    assert error_of(again) == error_of(first)
    assert (code_of(again), error_of(again).retryable) == ("NETWORK_ERROR", False)
    assert service.ran == ["session-1"]
    other = await engine.call("plain__echo", idempotency_key="l")  # the twin
    assert other.data == {"text": "done"}
    assert service.ran == ["session-1", "session-2"]


@pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning"
)  # of a killed engine's client
def test_outcome_of_a_keyed_call_is_unknown_if_the_engine_dies_in_a_session_begun_again(
    start_daemon: StartDaemon,
) -> None:
    class Service(ForgetfulServer):
        known: ClassVar[set[str]] = set()
        begun: ClassVar[list[str]] = []
        ran: ClassVar[list[str]] = []
        arrived = threading.Event()
        may_answer = threading.Event()

        def answer(self, status: int, message: Any) -> None:
            if len(self.ran) == 1 and not self.may_answer.is_set():
                self.arrived.set()
                assert self.may_answer.wait(60)
                self.close_connection = True
                return
            super().answer(status, message)

    service = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=service.serve_forever)
    thread.start()
    host = f"127.0.0.1:{service.server_port}"
    plain = {"url": f"http://{host}/mcp", "harmless": EVERY}
    settings = {
        "mcp_servers": json.dumps({"plain": plain}), "rest__allowed_hosts": json.dumps([host]),
    }  # fmt: skip

    def listed(daemon: Daemon) -> bool:
        with Client(daemon.socket) as client:
            return any(tool.name == "plain__echo" for tool in client.tools())

    def call(daemon: Daemon, key: str) -> Envelope:
        with Client(daemon.socket) as client:
            return client.call("plain__echo", {}, idempotency_key=key)

    try:
        daemon = start_daemon(**settings)
        wait_until(lambda: listed(daemon))
        Service.known.clear()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(call, daemon, "k")
            assert Service.arrived.wait(60)
            daemon.process.kill()
            daemon.process.wait(timeout=600)
            Service.may_answer.set()
            with pytest.raises(FumehoodError):
                first.result(60)
        assert Service.ran == [Service.begun[-1]] != [Service.begun[0]]
        again = start_daemon(**settings)
        wait_until(lambda: listed(again))
        assert code_of(call(again, "k")) == "OUTCOME_UNKNOWN"
        assert len(Service.ran) == 1
        assert call(again, "l").data == {"text": "done"}  # the twin
    finally:
        Service.may_answer.set()
        service.shutdown()
        thread.join()
        service.server_close()


async def test_private_server_address_requires_allowed_hosts(address: str) -> None:
    config = Config(mcp_servers={"tester": {"url": address}, "good": server(SCRIPTED)})
    async with Engine(config=config) as engine:
        await until(lambda: names(engine) == ["good__echo"])
        await until(lambda: "rest.allowed_hosts" in server_of(engine, "tester")._why)


@pytest.mark.needs("docker")
@pytest.mark.row("S1")
async def test_server_program_runs_in_a_hardened_container_by_default(
    python_image: Any,
) -> None:
    source = (UPSTREAMS / "scripted.py").read_text()
    boxed = {"command": ["/usr/bin/python3", "-c", source], "harmless": EVERY}
    async with serving(boxed=boxed) as engine:
        plan = await engine.call("boxed__echo", {"text": "a"}, dry_run=True)
        assert plan.data["placement"]["kind"] == "container"
        assert (await engine.call("boxed__echo", {"text": "a"})).data == {"text": "a"}
        label = f"label=fumehood.pid={os.getpid()}"
        listed = await anyio.run_process(["docker", "ps", "-q", "--filter", label])
        form = "{{.Config.User}} {{.HostConfig.NetworkMode}} {{.HostConfig.CapAdd}} {{.HostConfig.ReadonlyRootfs}}"
        shown = await anyio.run_process(
            ["docker", "inspect", "--format", form, *listed.stdout.decode().split()]
        )
        assert "10001:10001 none [] true" in shown.stdout.decode().splitlines()
    # It is removed then, or by a later engine if Docker was too busy.
    listed = await anyio.run_process(["docker", "ps", "-q", "--filter", label])
    assert listed.stdout == b""


@pytest.mark.needs("docker")
async def test_programs_behind_a_front_that_do_not_serve_are_lost(
    python_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GREETING_S", 3.0)
    breaks, stops = "head -c 99 /dev/zero > /proc/1/fd/1; sleep 60", "kill -STOP 1; sleep 60"
    commands = {
        "missing": (["/bin/none"], "No such file or directory"),
        "ends": (["/bin/sh", "-c", "echo broken >&2"], "it ended; it said: broken"),
        "breaks_the_protocol": (["/bin/sh", "-c", breaks], "it ended"),
        "stops_the_front": (["/bin/sh", "-c", stops], "it did not answer in time"),
    }
    servers = {
        name: {"command": command, "network": ["api.example.test"]}
        for name, (command, _) in commands.items()
    }
    config = Config(mcp_servers=servers, gateway={"hosts": ["api.example.test"]})
    async with Engine(config=config) as engine:
        for name, (_, why) in commands.items():
            await until(lambda name=name, why=why: why in server_of(engine, name)._why)


class Flood:
    """The streams of a program with endless output."""

    said = b""
    reads = 0

    async def read(self) -> bytes:
        self.reads += 1
        message = b'{"jsonrpc":"2.0","method":"notifications/message","params":{}}\n'
        return message * 2000 if self.reads < 20 else b""

    async def write(self, data: bytes) -> None: ...

    async def stop(self) -> None: ...


@pytest.mark.parametrize("is_mended", [True, False])
async def test_flooding_server_does_not_block_the_event_loop(
    is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_mended:  # the control: nobody else has a turn before the end
        monkeypatch.setattr(wall, "BUSY_S", 1e9)
    flood = Flood()
    reading = asyncio.ensure_future(mcp_wire.StreamWire(flood).serve())
    turns = 0
    while not reading.done() and turns < 3:
        await anyio.lowlevel.checkpoint()
        turns += 1
    assert (flood.reads < 20) is is_mended
    reading.cancel()
    await asyncio.wait({reading})
