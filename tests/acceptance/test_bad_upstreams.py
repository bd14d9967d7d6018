"""Every fault of a service, against one daemon: a clear error and no leaked resources.

Each row of the table is a REST tool with one retry, whose service has one fault.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import Daemon, running_daemon
from support.certificates import make_certificate
from support.definition_files import definition_directory
from support.definitions import rest_document
from support.http import SocketClient
from support.packages import install
from support.wait import wait_until
from upstream import Reply, Upstream, bomb, packed, redirect, running_upstream

pytestmark = pytest.mark.row("T5", "P6", "P8", "E1")

SECRET = "canary-51c0-secret-of-a-tool"
SHORT_MS, LONG_MS = 500, 60_000
MB = 1 << 20
OF_GUESTS = 2
"""Open files that the interpreter's guest and its standby may add during the test."""

INSIDE = '''
"""Looks at the engine from within, and gives names addresses. Only one address counts as public."""

import asyncio
import os
import socket
from fumehood import tool
from fumehood.outgoing import addresses
from fumehood.pipeline import retry

retry.BASE_S = 0.01
ANSWERS = {
    "rebound.test": [["127.0.0.3"], ["127.0.0.1"]],
    "mixed.test": [["127.0.0.3", "127.0.0.1"]],
}
ask_host = socket.getaddrinfo

def getaddrinfo(host, *args, **options):
    answers = ANSWERS.get(host.decode() if isinstance(host, bytes) else host)
    if answers is None:
        return ask_host(host, *args, **options)
    now = answers.pop(0) if len(answers) > 1 else answers[0]
    return [row for address in now for row in ask_host(address, *args, **options)]

socket.getaddrinfo = getaddrinfo
addresses.is_public = lambda address: str(address) == "127.0.0.3"

@tool(sandboxed=False)
async def look():
    """Count what the engine holds."""
    return {"tasks": len(asyncio.all_tasks()), "files": len(os.listdir("/proc/self/fd"))}

tools = [look]
'''

FINE = Reply()
REPEAT, NO_RETRY = "Repeat the call later.", "Do not retry."
UNKNOWN = "It may or may not have taken effect."
LATE = "did not answer in 0.5 s."


@dataclass(frozen=True)
class Fault:
    """A service's behaviour and the expected error, or the expected `data` without an error."""

    name: str
    reply: Reply = field(default_factory=Reply)
    code: str | None = "NETWORK_ERROR"
    says: str = REPEAT
    retryable: bool = True
    retries: int = 1
    data: Any = None
    retry_after_ms: int | None = None
    method: str = "GET"
    at: str = "http"
    """The name of the service to call."""
    is_heard: bool = True
    """Whether the request is expected to reach the service."""


def refused(name: str, reply: Reply, says: str = NO_RETRY, **more: Any) -> Fault:
    """A permanent fault, which is not retried."""
    return Fault(name, reply, "EXECUTION_ERROR", says, retryable=False, retries=0, **more)


def late(name: str, reply: Reply = FINE, says: str = LATE, **more: Any) -> Fault:
    return Fault(name, reply, "TIMEOUT", says, **more)


def too_long(name: str, reply: Reply) -> Fault:
    says = "is over 1048576 bytes. Ask for less."
    return Fault(name, reply, "OUTPUT_LIMIT_EXCEEDED", says, retryable=False, retries=0)


def not_allowed(name: str, reply: Reply = FINE, **more: Any) -> Fault:
    about = "redirected the request to another host. " if reply is not FINE else ""
    says = about + "The host has an address that is not public, and the operator has not allowed it"
    return Fault(name, reply, "PERMISSION_DENIED", says, retryable=False, retries=0, **more)


def raw(head: str, body: bytes = b"") -> Reply:
    return Reply(raw=head.replace("\n", "\r\n").encode() + body)


TEXT = "text/plain"
EMPTY_BLOCKS = gzip.compress(b"")[:10] + b"\x00\x00\x00\xff\xff" * 400_000
GZIP = {"content-encoding": "gzip"}
NOT_JSON = "answered with invalid JSON"
CHANGE = "Change the arguments, or do not retry."

FAULTS = (
    # -- no connection ---------------------------------------------------------------------
    Fault("port-closed", at="closed", is_heard=False, says="could not be reached. " + REPEAT),
    Fault("port-closed-post", at="closed", is_heard=False, method="POST"),
    Fault("name-unknown", at="unknown", is_heard=False, says="could not be resolved. " + REPEAT),
    Fault("no-tls", at="no-tls", is_heard=False, says="No secure connection"),
    Fault("certificate-for-another-name", at="tls-other-name", is_heard=False, says=NO_RETRY,
          retryable=False, retries=0),
    Fault("certificate-of-untrusted-issuer", at="tls-unknown", is_heard=False, says=NO_RETRY,
          retryable=False, retries=0),
    late("handshake-without-answer", at="mute", is_heard=False, says="in 0.5 s"),
    # -- addresses -------------------------------------------------------------------------
    not_allowed("private-address", at="private", is_heard=False),
    not_allowed("name-with-public-and-private-address", at="mixed", is_heard=False),
    not_allowed("redirect-to-private-address", redirect("http://127.0.0.1:1/admin")),
    not_allowed("redirect-to-mapped-address", redirect("http://[::ffff:127.0.0.1]:1/admin")),
    refused("redirect-loop", redirect("redirect-loop"), "more than 5 times. Do not retry."),
    refused("redirect-to-ftp", redirect("ftp://127.0.0.1/")),
    refused("redirect-of-post", redirect("/fine", 307), method="POST"),
    # -- late ------------------------------------------------------------------------------
    late("no-answer", Reply(held=True)),
    late("no-body", Reply(held_body=True)),
    late("one-byte-a-second", Reply(body=b"{}" * 100, drip_s=1)),
    late("one-header-byte-a-second", Reply(raw=b"HTTP/1.1 200 OK\r\n", drip_s=1)),
    late("endless-informational-responses",
         Reply(raw=b"HTTP/1.1 100 Continue\r\n\r\n" * 9, endless=True)),
    late("timeout-of-post", Reply(held=True), UNKNOWN, method="POST", retryable=False, retries=0),
    # -- broken off ------------------------------------------------------------------------
    Fault("reset", Reply(reset=True)),
    Fault("reset-of-post", Reply(reset=True), says=UNKNOWN, method="POST", retryable=False, retries=0),
    Fault("reset-in-the-body", Reply(body=b'{"a": 1}', reset_after=3)),
    Fault("closed-without-answer", Reply(raw=b"")),
    Fault("body-shorter-than-content-length", Reply(body=b'{"a": 1}', length=20)),
    Fault("negative-length", raw("HTTP/1.1 200 OK\ncontent-length: -1\n\n")),
    Fault("two-lengths", raw("HTTP/1.1 200 OK\ncontent-length: 2\ncontent-length: 3\n\n{} ")),
    Fault("invalid-chunk-size", raw("HTTP/1.1 200 OK\ntransfer-encoding: chunked\n\nzz\n")),
    Fault("unfinished-chunks", raw("HTTP/1.1 200 OK\ntransfer-encoding: chunked\n\n5\nab")),
    Fault("not-http", raw("220 mail.example ready\n")),
    Fault("head-too-long", raw("HTTP/1.1 200 OK\nx: " + "a" * 300_000)),
    Fault("nul-in-header", raw("HTTP/1.1 200 OK\nx: \0\ncontent-length: 2\n\n{}")),
    Fault("invalid-gzip", Reply(headers=GZIP)),
    Fault("gzip-cut-off", Reply(body=gzip.compress(b"{}")[:-4], headers=GZIP)),
    Fault("gzip-with-trailing-bytes", Reply(body=gzip.compress(b"{}") + b"more", headers=GZIP)),
    # -- too much --------------------------------------------------------------------------
    too_long("10-gb", Reply(body=b"a" * MB, endless=True, length=10 << 30, content_type=TEXT)),
    too_long("endless-chunks", Reply(body=b"a" * MB, endless=True, content_type=TEXT)),
    too_long("one-byte-too-many", Reply(body=b"a" * (MB + 1), content_type=TEXT)),
    Fault("nearly-too-long", Reply(body=b"a" * (MB - 200), content_type=TEXT), code=None, retries=0),
    too_long("gzip-bomb", bomb(64)),
    too_long("gzip-over-limit", packed(b"a" * (MB + 1), content_type=TEXT)),
    too_long("gzip-of-empty-blocks", Reply(body=EMPTY_BLOCKS, headers=GZIP)),
    refused("endless-error", Reply(400, b"a" * MB, endless=True, content_type=TEXT), CHANGE),
    # -- not understood --------------------------------------------------------------------
    refused("body-longer-than-content-length", Reply(body=b'{"a": 1}', length=3), NOT_JSON),
    refused("truncated-json", Reply(body=b"{"), NOT_JSON),
    refused("invalid-utf-8", Reply(body=b'"\xff"'), NOT_JSON),
    refused("nan", Reply(body=b"[NaN]"), NOT_JSON),
    refused("duplicate-key", Reply(body=b'{"a": 1, "a": 2}'), NOT_JSON),
    refused("10000-levels", Reply(body=b"[" * 10_000 + b"]" * 10_000), NOT_JSON),
    refused("huge-number", Reply(body=b"1" * 5000), NOT_JSON),
    refused("lone-surrogate", Reply(body=b'"\\ud800"'), NOT_JSON),
    refused("unsupported-content-encoding", Reply(headers={"content-encoding": "br"})),
    Fault("undecodable-text", Reply(body=b"\xff\x00", content_type=TEXT), code=None, retries=0,
          data={"content_base64": "/wA=", "content_type": TEXT}),
    Fault("answers-twice", Reply(body=b'{"a": 1}', then=b"HTTP/1.1 200 OK\r\n\r\n"), code=None,
          retries=0, data={"a": 1}),
    # -- refusals --------------------------------------------------------------------------
    refused("not-found", Reply(404, b'{"why": "none"}'), CHANGE),
    refused("teapot", Reply(418, b"tea", content_type=TEXT), CHANGE),
    refused("not-modified", Reply(304, b"")),
    Fault("other-protocol", raw("HTTP/1.1 101 Switching Protocols\nupgrade: x\nconnection: upgrade\n\n")),
    Fault("failed", Reply(500)),
    Fault("server-error-of-post", Reply(500), says=UNKNOWN, method="POST", retryable=False,
          retries=0),
    Fault("busy", Reply(503, headers={"retry-after": "0"}), retry_after_ms=0),
    Fault("unavailable-for-post", Reply(503), method="POST", retries=0),
    Fault("busy-for-an-hour", Reply(503, headers={"retry-after": "3600"}), retries=0,
          retry_after_ms=3_600_000),
    Fault("too-often", Reply(429, headers={"retry-after": "3600"}), "RATE_LIMITED", retries=0,
          retry_after_ms=3_600_000, says="too many requests. " + REPEAT),
    Fault("rate-limited-post", Reply(429), "RATE_LIMITED", method="POST", retries=0),
    Fault("rate-limited-with-invalid-retry-after", Reply(429, headers={"retry-after": "soon"}),
          "RATE_LIMITED"),
)  # fmt: skip


@dataclass
class Services:
    """The services and their addresses."""

    main: Upstream
    rebound: Upstream
    at: dict[str, str]

    @property
    def hosts(self) -> list[str]:
        """The private hosts that the daemon is allowed to reach."""
        named = (self.at[name] for name in self.at if name not in ("private", "mixed", "rebound"))
        return sorted({address.partition("://")[2] for address in named})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def services(place: Path) -> Iterator[Services]:
    with ExitStack() as stack:

        def secure(name: str) -> Upstream:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(make_certificate(place / name))
            return stack.enter_context(running_upstream(context))

        main = stack.enter_context(running_upstream())
        known, unknown = secure("known.pem"), secure("unknown.pem")
        mail = stack.enter_context(running_upstream(speaks=b"220 mail.example ready\r\n"))
        mute = stack.enter_context(running_upstream(speaks=b""))
        rebound = stack.enter_context(running_upstream(at=("127.0.0.3", main.port)))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            closed = listener.getsockname()[1]
        at = {
            "http": main.url,
            "closed": f"http://127.0.0.1:{closed}",
            "unknown": "http://nothing.invalid",
            "no-tls": f"https://{mail.authority}",
            "tls": f"https://localhost:{known.port}",
            "tls-other-name": known.url,
            "tls-unknown": f"https://localhost:{unknown.port}",
            "mute": f"https://{mute.authority}",
            "private": f"http://localhost:{main.port}",
            "mixed": f"http://mixed.test:{main.port}",
            "rebound": f"http://rebound.test:{main.port}",
        }
        yield Services(main, rebound, at)


def documents(services: Services) -> list[dict[str, Any]]:
    """The definitions of one tool per fault, and of the harmless tools."""
    tools = [
        {"name": f"try_{fault.name.replace('-', '_')}", "method": fault.method,
         "endpoint": f"{services.at[fault.at]}/{fault.name}", "timeout": SHORT_MS if fault.code == "TIMEOUT" else LONG_MS,
         "idempotent": fault.method == "GET", "retry_count": 1}
        for fault in FAULTS
    ]  # fmt: skip
    tools += [
        {"name": "harmless", "endpoint": f"{services.at['http']}/fine"},
        {"name": "harmless_tls", "endpoint": f"{services.at['tls']}/fine"},
        {"name": "recovering", "endpoint": f"{services.at['http']}/recovering", "retry_count": 1,
         "timeout": 4 * SHORT_MS, "idempotent": True},
        {"name": "rebound", "endpoint": f"{services.at['rebound']}/rebound"},
        {"name": "holder", "endpoint": f"{services.at['http']}/fine",
         "headers": {"authorization": "Bearer ${secret:key}"}},
        {"name": "thief", "endpoint": f"{services.at['http']}/stolen",
         "headers": {"authorization": "Bearer ${secret:key}"}},
    ]  # fmt: skip
    return [rest_document(**tool) for tool in tools]


@pytest.fixture(scope="module")
def daemon(place: Path, services: Services) -> Iterator[Daemon]:
    """One daemon for all faults. It trusts one certificate and has one secret, for one tool."""
    variables = install(place / "packages", "inside", INSIDE)
    variables |= {"SSL_CERT_FILE": str(place / "known.pem"), "TOOL_KEY": SECRET}
    key = {"env": "TOOL_KEY", "tools": ["holder"], "hosts": ["127.0.0.1"]}
    with definition_directory() as directory:
        for document in documents(services):
            directory.put(f"{document['name']}.json", document)
        with running_daemon(
            variables, host_tools="look", tools_directory=str(directory.path),
            rest__allowed_hosts=json.dumps(services.hosts), secrets=json.dumps({"key": key}),
            circuits__min_failures="10000",
        ) as daemon:  # fmt: skip
            yield daemon
            assert daemon.stop() == 0, daemon.log
            for trouble in (
                "internal_error",
                "Traceback",
                "never retrieved",
                "was destroyed",
                SECRET,
            ):
                assert trouble not in daemon.log


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[SocketClient]:
    client = daemon.client()
    yield client
    client.close()


@dataclass
class Held:
    """The daemon's resources: tasks, open files without kept connections, and memory."""

    tasks: int
    files: int
    memory_bytes: int


class Looker:
    """Measures the daemon's resources from outside and from within."""

    def __init__(self, daemon: Daemon, client: SocketClient) -> None:
        self._process = psutil.Process(daemon.process.pid)
        self._client = client

    def connections(self) -> list[int]:
        """The remote ports of its open connections."""
        return [each.raddr.port for each in self._process.net_connections("tcp") if each.raddr]

    def look(self) -> Held:
        seen = self._client.call("look").body["data"]
        files = seen["files"] - len(self.connections())
        return Held(seen["tasks"], files, self._process.memory_info().rss)


@pytest.fixture(scope="module")
def looker(daemon: Daemon, client: SocketClient) -> Looker:
    return Looker(daemon, client)


@pytest.fixture(scope="module")
def before(looker: Looker, client: SocketClient) -> Held:
    """The resources held after every feature was used once, before any fault."""
    assert client.calculate("1").status == 200
    for tool in ("harmless", "harmless_tls", "holder"):
        answer = client.call(tool)
        assert answer.status == 200, answer.body
    return looker.look()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_service_fault_is_a_clear_error_and_leaks_nothing(
    fault: Fault, services: Services, client: SocketClient, looker: Looker, before: Held
) -> None:
    main, path = services.main, f"/{fault.name}"
    main.script(path, fault.reply)
    answer = client.call(f"try_{fault.name.replace('-', '_')}").body
    error, metadata = answer["error"], answer["metadata"]
    if fault.code is None:
        assert error is None
        assert fault.data in (None, answer["data"])
    else:
        assert (error["code"], error["retryable"]) == (fault.code, fault.retryable), error
        assert fault.says in error["message"]
        assert re.search(r"(Repeat|Do not|Ask for|or do not|may or may not)", error["message"])
        assert error.get("retry_after_ms") == fault.retry_after_ms
        assert answer["data"] == {}
    if fault.code == "TIMEOUT":
        limit = {"ended_by": "wall_time", "limit": {"timeout_seconds": SHORT_MS / 1000}}
        assert error["details"] == limit
    assert metadata["retry_count"] == fault.retries
    times = 6 if fault.name == "redirect-loop" else fault.retries + 1
    assert main.count(path) == (times if fault.is_heard else 0)
    assert main.count("/admin") == 0
    # Nothing is left, and the next call of another tool is as good as ever.
    assert client.call("harmless").status == 200
    wait_until(lambda: looker.connections().count(main.port) == 1)
    wait_until(lambda: len(looker.connections()) <= 2)  # the other is that of `harmless_tls`
    # More than once: a look may find what the guest's next child needs for a moment.
    wait_until(lambda: looker.look().tasks <= before.tasks)
    wait_until(lambda: looker.look().files <= before.files + OF_GUESTS)
    assert looker.look().memory_bytes - before.memory_bytes < 48 * MB


@pytest.mark.parametrize(
    "first",
    [
        Reply(reset=True),
        Reply(held=True),
        Reply(500),
        Reply(503, headers={"retry-after": "0"}),
        Reply(429, headers={"retry-after": "0"}),
        Reply(body=b'{"a": 1}', length=20),
    ],
    ids=["reset", "timeout", "server-error", "unavailable", "rate-limited", "truncated-body"],
)
def test_transient_failure_is_retried_once_and_succeeds(
    first: Reply, services: Services, client: SocketClient
) -> None:
    services.main.script("/recovering", first, Reply(body=b'{"now": "well"}'))
    answer = client.call("recovering").body
    assert (answer["error"], answer["data"]) == (None, {"now": "well"})
    assert answer["metadata"]["retry_count"] == 1


def test_dns_rebinding_to_private_address_is_refused(
    services: Services, client: SocketClient
) -> None:
    services.rebound.script("/rebound", Reply(body=b'{"here": 3}', headers={"connection": "close"}))
    assert client.call("rebound").body["data"] == {"here": 3}
    assert client.call("rebound").code == "PERMISSION_DENIED"
    assert services.rebound.count("/rebound") == 1
    assert services.main.count("/rebound") == 0


@pytest.mark.row("R1")
def test_tool_referencing_unbound_secret_is_left_out_and_logged(
    services: Services, daemon: Daemon, client: SocketClient
) -> None:
    assert client.call("thief").code == "TOOL_NOT_FOUND"
    assert "the secret 'key' is not bound to the tool thief" in daemon.log
    assert client.call("holder").body["data"]["headers"]["authorization"] == "Bearer [redacted]"
    assert services.main.count("/stolen") == 0
