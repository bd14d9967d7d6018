"""MCP clients that lie, flood or disconnect: over stdio, at `/mcp` and on loopback TCP."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from conftest import Daemon
from fumehood.mcp.server.stdio import MAX_REQUESTS
from support.approving import approving_daemon, ran
from support.authority import Authority, ask
from support.mcp import ASKING, META, RawClient, modern, post, raw_client
from support.wait import wait_until

pytestmark = pytest.mark.row("D3")

LOOP = "n = 0\nwhile True: n = n + 1"
SUM = {"expression": "40 + 2"}
MB = 1 << 20


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture(scope="module")
def daemon(port: int) -> Iterator[Daemon]:
    """A daemon with dangerous tools, an approver and an address on loopback."""
    with approving_daemon(tcp=f"127.0.0.1:{port}") as running:
        yield running
        assert "internal_error" not in running.log


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[RawClient]:
    with raw_client(daemon) as client:
        yield client


@pytest.fixture(scope="module")
def enduring(daemon: Daemon) -> Iterator[RawClient]:
    """One server for all attacks that it survives."""
    with raw_client(daemon) as client:
        yield client


def still_answers(raw: RawClient) -> bool:
    """Whether the server still answers a harmless call: the twin of every attack."""
    raw.call("twin", "calculator", **SUM)
    return raw.receive()["result"]["structuredContent"]["value"] == 42


# -- lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"garbage", -32700),
        (b"\x00\xff\xfe", -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"', -32700),
        (b"[" * 10_000 + b"]" * 10_000, -32700),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, -32700),
        (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"tools/list"}', -32700),
        (b'[{"jsonrpc":"2.0","id":1,"method":"tools/list"}]', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"tools/list"}', -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"tools/list"}', -32600),
    ],
)
def test_malformed_message_gets_an_error_and_server_continues(
    enduring: RawClient, line: bytes, code: int
) -> None:
    enduring.send(line)
    answer = enduring.receive()
    assert (answer["id"], answer["error"]["code"]) == (None, code)
    assert still_answers(enduring)


def test_line_of_100_mb_is_refused_without_holding_it(raw: RawClient) -> None:
    assert still_answers(raw)
    before = psutil.Process(raw.process.pid).memory_info().rss
    raw.send(b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * (100 * MB) + b'"}')
    answer = raw.receive()
    assert (answer["id"], answer["error"]["code"]) == (None, -32600)
    assert "over 8 MB" in answer["error"]["message"]
    assert psutil.Process(raw.process.pid).memory_info().rss < before + 40 * MB
    assert still_answers(raw)


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("nothing", {}, -32601),
        ("prompts/list", {}, -32601),
        ("tools/call", {}, -32602),
        ("tools/call", {"name": ["calculator"]}, -32602),
        ("tools/call", {"name": "x" * 300}, -32602),
        ("tools/call", {"name": "calculator", "arguments": [1]}, -32602),
        ("tools/call", {"name": "run_tool", "arguments": {}}, -32602),
        ("tools/list", {"cursor": "more"}, -32602),
        ("resources/read", {"uri": "file:///etc/passwd"}, -32002),
        ("resources/read", {}, -32002),
    ],
)
def test_invalid_request_gets_its_error_code(
    enduring: RawClient, method: str, params: dict[str, Any], code: int
) -> None:
    enduring.request(1, method, **params)
    answer = enduring.receive()
    assert (answer["id"], answer["error"]["code"]) == (1, code)
    assert still_answers(enduring)


@pytest.mark.parametrize("meta", [7, [], {"progressToken": {}}, {"progressToken": None}])
def test_malformed_meta_is_ignored(enduring: RawClient, meta: Any) -> None:
    enduring.request(1, "tools/call", name="calculator", arguments=SUM, _meta=meta)
    assert enduring.receive()["result"]["structuredContent"]["value"] == 42


def test_duplicate_request_id_is_refused_and_first_request_is_answered(raw: RawClient) -> None:
    raw.call(7, "run_restricted_python", code=LOOP)
    raw.call(7, "calculator", **SUM)
    raw.call("7", "calculator", **SUM)  # another id
    first, second, third = (raw.receive() for _ in range(3))
    assert first["error"]["message"] == "A request with this id is not answered yet."
    assert second["id"] == "7"
    assert third["result"]["content"][0]["text"].startswith("TIMEOUT: ")


def test_requests_over_the_limit_are_refused_and_all_are_answered(raw: RawClient) -> None:
    raw.initialize()
    for number in range(MAX_REQUESTS + 5):
        meta = {**META}
        raw.request(number, "subscriptions/listen", notifications={}, _meta=meta)
    refused = 0
    seen = 0
    while seen < MAX_REQUESTS + 5:
        message = raw.receive()
        seen += 1
        refused += message.get("error", {}).get("code") == -32600
    assert refused == 5
    raw.notify("notifications/cancelled", requestId=0)
    assert still_answers(raw)


def test_cancelled_call_ends_without_a_response(daemon: Daemon, raw: RawClient) -> None:
    raw.initialize()
    raw.call(1, "hold", text="never approved")
    assert raw.receive()["id"] == 1  # the control: it waits for nobody
    raw.call(2, "run_restricted_python", code=LOOP)
    wait_until(lambda: _computes(daemon))
    raw.notify("notifications/cancelled", requestId="2")  # not this request's id
    raw.notify("notifications/cancelled", requestId=99)
    raw.notify("notifications/cancelled", requestId=[2])
    raw.notify("notifications/cancelled", requestId=2)
    wait_until(lambda: newest(daemon) == ("run_restricted_python", "CANCELLED"))
    assert still_answers(raw)  # and its answer is the next one


def test_client_disconnect_cancels_its_running_call(daemon: Daemon) -> None:
    for leave in (RawClient.end, lambda raw: raw.process.kill()):
        with raw_client(daemon) as raw:
            raw.initialize()
            assert still_answers(raw)
            raw.call(2, "run_restricted_python", code=LOOP)
            wait_until(lambda: _computes(daemon))
            leave(raw)
        wait_until(lambda: newest(daemon) == ("run_restricted_python", "CANCELLED"))


def newest(daemon: Daemon) -> tuple[str, str]:
    """Tool and code of the most recently ended call."""
    (found,) = ask(daemon.socket, "GET", "/v1/calls?limit=1").body["data"]["items"]
    return found["tool_name"], found["code"]


COMPUTING_S = 0.4
"""CPU seconds above a child's warm-up time, which show that it runs the endless program."""


def _computes(daemon: Daemon) -> bool:
    """Whether a child of the daemon runs the endless program, according to the kernel."""
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    return any(
        child.status() == psutil.STATUS_RUNNING and child.cpu_times().user > COMPUTING_S
        for child in children
    )


def test_request_refused_by_the_daemon_gets_its_error(daemon: Daemon) -> None:
    with raw_client(daemon, "--agent", "no agent!") as raw:
        raw.request(5, "tools/list")
        answer = raw.receive()
    assert answer["id"] == 5
    assert "INVALID_PARAMS" in answer["error"]["message"]
    assert "agent_id" in answer["error"]["message"]


# -- other clients' requests ----------------------------------------------------------------


def initialized(daemon: Daemon, credential: str | None = None, **capabilities: Any) -> str:
    """Initialize a session and return its id."""
    params = {"protocolVersion": "2025-11-25", "capabilities": capabilities}
    message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    return post(daemon.socket, message, credential).headers["mcp-session-id"]


def test_request_cannot_be_cancelled_from_another_session_or_principal(daemon: Daemon) -> None:
    token = Authority(daemon.home, daemon.credential).token("rival")
    session, other = initialized(daemon), initialized(daemon)
    stop = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
    call = {"name": "run_restricted_python", "arguments": {"code": LOOP}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}

    def ended_with(*cancels: Any) -> str:
        headers = {"content-type": "application/json", "mcp-session-id": session}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(daemon.socket))
            client = http.client.HTTPConnection("fumehood")
            client.sock = connection
            client.request("POST", "/mcp", json.dumps(message), headers)
            wait_until(lambda: _computes(daemon))
            for cancel in cancels:
                cancel()
            answer = json.loads(client.getresponse().read())
        return answer["result"]["content"][0]["text"].partition(":")[0]

    foreign = {"mcp-session-id": session}
    attacks = (
        lambda: post(daemon.socket, stop, **{"mcp-session-id": other}),
        lambda: post(daemon.socket, stop),
        lambda: post(daemon.socket, stop, token, **foreign),
    )
    assert ended_with(*attacks) == "TIMEOUT"
    assert ended_with(lambda: post(daemon.socket, stop, **foreign)) == "CANCELLED"  # the twin


def test_change_stream_ends_when_its_token_is_revoked(daemon: Daemon) -> None:
    authority = Authority(daemon.home, daemon.credential)
    with socket.socket(socket.AF_UNIX) as revoked, socket.socket(socket.AF_UNIX) as valid:
        for connection, name in ((revoked, "gone"), (valid, "stays")):
            token = authority.token(name)
            connection.settimeout(30)
            connection.connect(str(daemon.socket))
            head = f"GET /mcp HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")  # it has begun
            if connection is revoked:
                authority.do("DELETE", f"/v1/tokens/{token.split('_')[1]}")
        ending = b""
        while not ending.endswith(b"0\r\n\r\n"):
            ending += (chunk := revoked.recv(4096))
            assert chunk
        tool = {"name": "new", "type": "REST", "description": "Look up.", "version": "1.0.0",
                "method": "GET", "parameters": {"type": "object"},
                "endpoint": "https://e.example/"}  # fmt: skip
        authority.do("POST", "/v1/tools", tool)
        told = b""
        while b"list_changed" not in told:
            told += (chunk := valid.recv(4096))
            assert chunk


@pytest.mark.parametrize("session", ["x", "2025-11-25.asks.0", "../../etc", "2099-01-01.plain.0"])
def test_invalid_session_id_is_not_found(daemon: Daemon, session: str) -> None:
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    answer = post(daemon.socket, listing, **{"mcp-session-id": session})
    assert answer.status == 404
    assert post(daemon.socket, listing).status == 200


# -- approvals --------------------------------------------------------------------------------


def waiting(daemon: Daemon, text: str, credential: str | None = None) -> str:
    """Make a call that waits, and return its request state."""
    call = modern(1, "tools/call", ASKING, name="note", arguments={"text": text})
    result = post(daemon.socket, call, credential).body["result"]
    assert result["resultType"] == "input_required"
    assert result["inputRequests"]["approval"]["params"]["mode"] == "form"
    return result["requestState"]


ACCEPTED = {"approval": {"action": "accept", "content": {}}}


def again(daemon: Daemon, state: Any, credential: str | None = None, **call: Any) -> Any:
    """Repeat the call with this state, and return the body of the answer."""
    params = {"name": "note", "arguments": {"text": "wanted"}, **call}
    message = modern(2, "tools/call", ASKING, requestState=state, inputResponses=ACCEPTED, **params)
    return post(daemon.socket, message, credential).body


def test_forged_request_state_is_refused_and_runs_nothing(daemon: Daemon) -> None:
    token = Authority(daemon.home, daemon.credential).token("thief")
    state = waiting(daemon, "wanted")
    call_id, _, digest = state.partition(".")
    theirs = waiting(daemon, "wanted", token)
    attacks: list[tuple[Any, str | None, dict[str, Any]]] = [
        ("", None, {}),
        (7, None, {}),
        ("x" * 100_000, None, {}),
        (call_id, None, {}),
        (f"{call_id}.", None, {}),
        (f"call_0.{digest}", None, {}),
        (f"{call_id}.{'0' * 64}", None, {}),
        (state, None, {"arguments": {"text": "another"}}),
        (state, None, {"name": "hold"}),
        (state, token, {}),
        (theirs, None, {}),
        (f"{theirs.partition('.')[0]}.{digest}", None, {}),
    ]
    number = pending(daemon)
    for forged, credential, call in attacks:
        answer = again(daemon, forged, credential, **call)
        assert answer["error"]["code"] == -32602, (forged, call)
        assert "call_" not in answer["error"]["message"]
    assert (ran(daemon), pending(daemon)) == ([], number)
    twin = again(daemon, state)["result"]
    assert twin["content"][0]["text"].startswith("REQUIRES_HUMAN_APPROVAL: ")
    assert (ran(daemon), pending(daemon)) == ([], number)


def test_elicitation_answer_from_another_principal_is_ignored(daemon: Daemon) -> None:
    """The id of an elicitation request must not be enough to answer it."""
    token = Authority(daemon.home, daemon.credential).token("eve")
    with raw_client(daemon) as raw:
        raw.initialize(elicitation={})
        raw.call(1, "note", text="asked of its own client")
        question = raw.receive()
        assert question["method"] == "elicitation/create"
        answer = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}}
        assert post_notice(daemon, answer, token) == 202
        assert post_notice(daemon, {**answer, "id": "fumehood-0"}) == 202
        raw.request(2, "ping")
        assert raw.receive()["id"] == 2  # the call is not answered yet
        raw.send(answer)
        assert raw.receive()["id"] == 1


def post_notice(daemon: Daemon, message: Any, credential: str | None = None) -> int:
    """The HTTP status of a message without a response."""
    headers = {"content-type": "application/json"}
    if credential is not None:
        headers["authorization"] = f"Bearer {credential}"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.socket))
        client = http.client.HTTPConnection("fumehood")
        client.sock = connection
        client.request("POST", "/mcp", json.dumps(message), headers)
        return client.getresponse().status


def pending(daemon: Daemon) -> int:
    """The number of pending approvals."""
    path = "/v1/approvals?state=pending"
    return len(ask(daemon.control, "GET", path, None, daemon.credential).body["data"]["items"])


# -- headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"mcp-method": "tools/list"}, 400, -32020),
        ({"mcp-name": "run_shell"}, 400, -32020),
        ({"mcp-name": "=?base64?Y2FsY3Vs?="}, 400, -32020),
        ({"mcp-name": "=?base64?###?="}, 400, -32020),
        ({"mcp-protocol-version": "2025-11-25"}, 400, -32020),
        ({"mcp-name": "=?base64?Y2FsY3VsYXRvcg==?="}, 200, None),
        ({}, 200, None),
    ],
)
def test_headers_contradicting_the_body_are_refused(
    daemon: Daemon, headers: dict[str, str], status: int, code: int | None
) -> None:
    message = modern(1, "tools/call", name="calculator", arguments=SUM)
    answer = post(daemon.socket, message, **headers)
    assert answer.status == status
    assert answer.body.get("error", {}).get("code") == code


def test_unsupported_version_or_method_is_refused_by_name(daemon: Daemon) -> None:
    unknown = {**META, "io.modelcontextprotocol/protocolVersion": "2099-01-01"}
    answer = post(daemon.socket, modern(1, "tools/list", unknown))
    assert (answer.status, answer.body["error"]["code"]) == (400, -32022)
    assert "2026-07-28" in answer.body["error"]["data"]["supported"]
    bare = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
    assert post(daemon.socket, modern(1, "tools/list", bare)).body["error"]["code"] == -32602
    assert post(daemon.socket, modern(1, "ping")).status == 404
    assert post(daemon.socket, modern(1, "initialize")).status == 404
    assert post(daemon.socket, b"[" * 9).body["error"]["code"] == -32700
    assert post(daemon.socket, modern(1, "tools/list")).status == 200


# -- the loopback address ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def credentials(daemon: Daemon) -> dict[str, str]:
    """A caller's token, another one without the scope, and an approver's credential."""
    authority = Authority(daemon.home, daemon.credential)
    return {
        "caller": authority.token("tcp"),
        "robot": authority.token("robot", scopes=["approve"]),
        "approver": daemon.credential,
        "unknown": "fht_0000000000000000_" + "a" * 43,
    }


PATHS = ["/mcp", "/v1/tools", "/v1/tools/calculator/call", "/v1/health", "/v1/approvals/callback"]
OWN_HOST = "127.0.0.1:{port}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("who", "headers", "status"),
    [
        (None, {}, 401),
        ("unknown", {}, 401),
        ("robot", {}, 401),
        ("approver", {}, 401),
        ("caller", {"host": "evil.example"}, 403),
        ("caller", {"host": "127.0.0.1"}, 403),
        ("caller", {"host": "127.0.0.1:1"}, 403),
        ("caller", {"origin": "https://evil.example"}, 403),
        ("caller", {"origin": "null"}, 403),
        ("caller", {"origin": "http://127.0.0.1:1"}, 403),
        (None, {"origin": "https://evil.example"}, 403),
    ],
)
def test_tcp_request_with_foreign_host_origin_or_invalid_token_is_refused(
    daemon: Daemon, port: int, credentials: dict[str, str], path: str, who: str | None,
    headers: dict[str, str], status: int,
) -> None:  # fmt: skip
    sent = {"host": OWN_HOST.format(port=port), **headers}
    if who is not None:
        sent["authorization"] = f"Bearer {credentials[who]}"
    assert over_tcp(port, "POST", path, sent)[0] == status


@pytest.mark.parametrize("host", [OWN_HOST, "localhost:{port}", "LOCALHOST:{port}"])
@pytest.mark.parametrize("origin", [None, "http://127.0.0.1:{port}", "http://localhost:{port}"])
def test_twin_tcp_request_with_own_host_and_token_is_answered(
    port: int, daemon: Daemon, credentials: dict[str, str], host: str, origin: str | None
) -> None:
    headers = {
        "host": host.format(port=port), "authorization": f"Bearer {credentials['caller']}",
    }  # fmt: skip
    if origin is not None:
        headers["origin"] = origin.format(port=port)
    status, body = over_tcp(port, "POST", "/mcp", headers)
    assert status == 200
    assert "calculator" in [tool["name"] for tool in body["result"]["tools"]]


def test_tcp_request_without_host_header_is_refused(port: int, daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        connection.sendall(b"POST /mcp HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))


def test_control_routes_are_not_served_over_tcp(
    port: int, daemon: Daemon, credentials: dict[str, str]
) -> None:
    headers = {
        "host": OWN_HOST.format(port=port), "authorization": f"Bearer {credentials['caller']}",
    }  # fmt: skip
    for path in ("/v1/tokens", "/v1/agents", "/v1/audit"):
        assert over_tcp(port, "POST", path, headers)[0] == 404


def over_tcp(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
    """Send one request with exactly these headers."""
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        client.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        for name, value in sent.items():
            client.putheader(name, value)
        client.endheaders(body)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        client.close()
