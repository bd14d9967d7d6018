"""The address of the engine on a network: TLS and a token, or nothing.

The loopback address without TLS is attacked in `test_mcp`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from conftest import running_daemon
from fumehood.client import AsyncClient, Client
from fumehood.config import TlsSettings
from fumehood.core.errors import FumehoodError
from fumehood.core.fair_share import FairShare
from fumehood.http.peer import LOOK_S, MAX_CONNECTIONS
from fumehood.http.server import CountingListener, context_of
from fumehood.protocol.engine_paths import ConfigError
from support.authority import Authority
from support.certificates import make_certificate
from support.health import Health
from support.wait import wait_until

pytestmark = pytest.mark.row("B10", "D3")

NAME = "engine.example"
FEW = 4
"""Connections of one address."""

TOO_MANY = "Too many connections from one address"
CALL = "/v1/tools/calculator/call"
BODY = json.dumps({"arguments": {"expression": "6 * 7"}}).encode()


@dataclass
class Site:
    """A daemon that listens on an address of this machine."""

    port: int
    token: str
    approver: str
    read_log: Callable[[], str]
    certificate: Path | None = None

    def ask(self, path: str, headers: dict[str, str], method: str = "POST") -> tuple[int, Any]:
        """Send one request, over TLS if the daemon has a certificate, which is verified."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.connect()
        if self.certificate is not None:
            context = ssl.create_default_context(cafile=str(self.certificate))
            connection.sock = context.wrap_socket(connection.sock, server_hostname=NAME)
        try:
            sent = {"host": NAME, "content-type": "application/json", **headers}
            connection.request(method, path, BODY, sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=600)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    certificate = make_certificate(tmp_path_factory.mktemp("tls") / "cert.pem", NAME)
    key = certificate.with_suffix(".key")
    key.chmod(0o600)
    with _site(tls__cert=str(certificate), tls__key=str(key)) as running:
        yield replace(running, certificate=certificate)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Site]:
    with _site(tcp_behind_proxy="true") as running:
        yield running


@pytest.fixture(params=["tls", "proxy"])
def site(request: pytest.FixtureRequest) -> Site:
    running: Site = request.getfixturevalue(request.param)
    return running


@contextmanager
def _site(**settings: str) -> Iterator[Site]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running_daemon(approver=True, tcp=f"127.0.0.1:{port}", **settings) as daemon:
        authority = Authority(daemon.home, daemon.credential)
        token = authority.token("desk")
        yield Site(port, token, daemon.credential, lambda: daemon.log)


def test_attack_request_without_a_callers_token_or_from_a_page_is_refused(site: Site) -> None:
    for credential in ("", "Bearer fht_0000000000000000_" + "a" * 43, f"Bearer {site.approver}"):
        headers = {"authorization": credential} if credential else {}
        for path in (CALL, "/mcp", "/v1/health"):
            assert site.ask(path, headers)[0] == 401
    own = {"authorization": f"Bearer {site.token}"}
    for origin in ("https://evil.example", f"https://{NAME}", "null"):
        assert site.ask(CALL, {**own, "origin": origin})[0] == 403
    for path in ("/v1/tokens", "/v1/agents", "/v1/audit"):
        assert site.ask(path, own)[0] == 404


def test_twin_request_with_a_token_is_answered_under_every_name_of_the_server(site: Site) -> None:
    for host in (NAME, "10.1.2.3:8443"):
        status, answer = site.ask(CALL, {"authorization": f"Bearer {site.token}", "host": host})
        assert (status, answer["data"]["value"]) == (200, 42)


@pytest.mark.anyio
async def test_clients_reach_the_engine_over_tls_only_if_they_trust_its_certificate(
    tls: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"https://localhost:{tls.port}"
    unreached = pytest.raises(FumehoodError, match="No engine answers on https://localhost")
    with Client(address, credential=tls.token) as stranger, unreached:
        stranger.tools()
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
    with Client(address, credential=tls.token) as client:
        assert client.call("calculator", {"expression": "6 * 7"}).data["value"] == 42
        assert "calculator" in {tool.name for tool in client.tools()}
    async with AsyncClient(address, credential=tls.token) as client:
        assert (await client.call("calculator", {"expression": "6 * 7"})).success
    for wrong, credential in ((address, None), (address.replace("https", "http"), tls.token)):
        with pytest.raises(ValueError, match=r"needs a token|begins with https"):
            Client(wrong, credential=credential)


def test_attack_plain_http_an_old_protocol_and_a_silent_client_get_no_answer(
    tls: Site, health: Health
) -> None:
    too_many = MAX_CONNECTIONS // 2 + 1
    health.expect_connections(too_many)
    assert TOO_MANY not in tls.read_log()
    with tls.connect() as silent:
        with tls.connect() as plain:
            request = f"POST {CALL} HTTP/1.1\r\nhost: {NAME}\r\nauthorization: Bearer {tls.token}"
            plain.sendall(f"{request}\r\ncontent-length: 0\r\n\r\n".encode())
            assert not plain.recv(1000).startswith(b"HTTP")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with tls.connect() as connection, pytest.raises((ssl.SSLError, OSError)):
            old.wrap_socket(connection)
        assert tls.ask("/v1/tools", {"authorization": f"Bearer {tls.token}"}, "GET")[0] == 200
        assert silent.recv(1) == b""  # the handshake's time is over
    with ExitStack() as held:
        many = [held.enter_context(tls.connect()) for _ in range(too_many)]

        def is_refused() -> bool:
            """Whether one more is. On a busy machine the first ones are closed for their silence."""
            many.append(held.enter_context(tls.connect()))
            return TOO_MANY in tls.read_log()

        wait_until(is_refused)
        wait_until(lambda: select.select(many[-1:], [], [], 0)[0])


@pytest.mark.parametrize("is_counted", [True, False], ids=["attack", "control"])
def test_attack_silent_handshakes_are_bounded_and_twin_of_another_address_is_served(
    tmp_path: Path, is_counted: bool
) -> None:
    certificate = make_certificate(tmp_path / "cert.pem", NAME)
    (tmp_path / "cert.key").chmod(0o600)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    shares = FairShare(FEW + 1, FEW)
    served = CountingListener(listener, shares) if is_counted else listener
    context = ssl.create_default_context(cafile=str(certificate))

    def connect(source: str) -> socket.socket:
        return socket.create_connection(address, timeout=600, source_address=(source, 0))

    def require_served(source: str) -> ssl.SSLSocket:
        secure = context.wrap_socket(connect(source), server_hostname=NAME)
        secure.sendall(b"x")
        assert secure.recv(1) == b"x"
        return secure

    def attack() -> None:
        with ExitStack() as held:
            silent = [held.enter_context(connect("127.0.0.1")) for _ in range(3 * FEW)]
            closed = 2 * FEW if is_counted else 0
            wait_until(lambda: len(select.select(silent, [], [], 0)[0]) == closed)
            held.enter_context(require_served("127.0.0.2"))
            one_more = held.enter_context(connect("127.0.0.3"))  # too many in all
            assert bool(select.select([one_more], [], [], 0.5)[0]) is is_counted
        wait_until(lambda: shares.total == 0)
        require_served("127.0.0.1").close()

    async def serve() -> None:
        tls = context_of(TlsSettings(cert=certificate, key=tmp_path / "cert.key"))
        async with await asyncio.start_server(_echo, sock=served, ssl=tls):
            await asyncio.to_thread(attack)

    asyncio.run(serve())


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(1))
    await reader.read()
    writer.close()


def test_attack_connections_without_a_request_are_closed_and_twin_is_not(tls: Site) -> None:
    """They would hold the places of those who have a token."""
    context = ssl.create_default_context(cafile=str(tls.certificate))
    request = f"GET /v1/tools HTTP/1.1\r\nhost: {NAME}\r\nauthorization: Bearer {tls.token}\r\n"
    with (
        context.wrap_socket(tls.connect(), server_hostname=NAME) as silent,
        context.wrap_socket(tls.connect(), server_hostname=NAME) as twin,
    ):
        twin.sendall(f"{request}\r\n".encode())
        assert twin.recv(1000).startswith(b"HTTP/1.1 200")
        silent.sendall(request.encode())  # the header never ends
        silent.settimeout(LOOK_S + 5)
        with suppress(ConnectionResetError):
            assert silent.recv(1) == b""
        twin.settimeout(0.1)
        with suppress(TimeoutError):
            while twin.recv(100_000):
                pass
        twin.settimeout(30)
        twin.sendall(f"{request}\r\n".encode())
        assert twin.recv(1000).startswith(b"HTTP/1.1 200")


def test_certificate_or_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    cert = make_certificate(tmp_path / "cert.pem")
    key = tmp_path / "cert.key"
    key.chmod(0o640)
    context_of(TlsSettings(cert=cert, key=key))
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    for settings, words in (
        (TlsSettings(cert=tmp_path / "none", key=key), "cannot be read: No such file"),
        (TlsSettings(cert=other, key=key), "cannot be used"),
        (TlsSettings(cert=make_certificate(other), key=key), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=words):
            context_of(settings)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="every user can read"):
        context_of(TlsSettings(cert=cert, key=key))
