"""Attacks through `fetch_url`, where the caller chooses the whole URL."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import httpcore2
import psutil
import pytest

from fumehood import Config, Engine, Envelope, InvalidDefinition
from fumehood.outgoing import addresses
from fumehood.outgoing.addresses import RESOLVED_AT_ONCE, CheckedBackend
from fumehood.outgoing.upstreams import Upstreams
from fumehood.registry.index import filter_tools
from fumehood.registry.secrets import RestSettings, SecretSettings
from fumehood.registry.settings import WebToolSettings
from support.attacks import LOCAL_HOSTS
from upstream import Reply, Upstream, bomb, redirect, running_upstream

pytestmark = [pytest.mark.anyio, pytest.mark.row("T5", "S1")]

BOUND_S = 20.0
SECRET = "canary-92ab-secret-of-a-tool"


def config(home: Path, *allowed: str, only: tuple[str, ...] | None = None, **more: Any) -> Config:
    web = WebToolSettings(fetch_url=True, allowed_hosts=allowed, only_hosts=only)
    return Config(home=home, web=web, **more)


async def fetch_with(engine: Engine, url: str) -> Envelope:
    return await engine.call("fetch_url", {"url": url}, enable_retry=False)


async def fetch(home: Path, url: str, *allowed: str, **settings: Any) -> Envelope:
    async with Engine(config=config(home, *allowed, **settings)) as engine:
        return await fetch_with(engine, url)


def code(envelope: Envelope) -> str | None:
    return envelope.error.code if envelope.error is not None else None


async def test_fetch_of_local_host_is_refused_in_any_spelling(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"http://{host}:{upstream.port}/admin" for host in LOCAL_HOSTS]
    async with Engine(config=config(home)) as engine:
        for url in urls:
            assert code(await fetch_with(engine, url)) == "PERMISSION_DENIED", url
        assert upstream.connections == 0
        monkeypatch.setattr(addresses, "is_public", lambda address: True)  # control
        for url in urls:
            assert (await fetch_with(engine, url)).success, url
        monkeypatch.undo()
    assert upstream.count("/admin") == len(urls)
    allowed = [host.removesuffix(".") for host in LOCAL_HOSTS]
    async with Engine(config=config(home, *allowed)) as engine:  # twin
        for url in urls:
            assert (await fetch_with(engine, url)).success, url
    assert upstream.count("/admin") == 2 * len(urls)


async def test_fetch_of_unsupported_or_malformed_url_is_refused(
    upstream: Upstream, home: Path
) -> None:
    async with Engine(config=config(home, upstream.authority)) as engine:
        for url in (
            "file:///etc/passwd",
            "gopher://127.0.0.1:{port}/_x",
            "http://me:pw@127.0.0.1:{port}/",
            "http://127.0.0.1:{port}\\@example.org/",
            "http://127.0.0.1:{port}/\r\nx-secret: ${{secret:key}}",
        ):
            refused = await fetch_with(engine, url.format(port=upstream.port))
            assert code(refused) == "INVALID_PARAMS", url
        assert upstream.connections == 0
        assert (await fetch_with(engine, upstream.url)).success  # twin


async def test_disabled_web_tools_send_nothing_and_name_their_setting(
    upstream: Upstream, home: Path
) -> None:
    rest = RestSettings(allowed_hosts=(upstream.authority,))
    async with Engine(config=Config(home=home, rest=rest)) as engine:
        fetched = await engine.call("fetch_url", {"url": upstream.url})
        searched = await engine.call("search_web", {"query": "x"})
        listed = {tool.name: tool.is_active for tool in engine.tools()}
        offered = {tool.name for tool in filter_tools(engine.tools()).tools}
    assert (code(fetched), code(searched)) == ("TOOL_DISABLED", "TOOL_DISABLED")
    assert "web.fetch_url = true" in fetched.error.message
    assert "web.search" in searched.error.message
    assert (listed["fetch_url"], listed["search_web"]) == (False, False)
    assert not {"fetch_url", "search_web"} & offered
    assert upstream.connections == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "NATIVE", "executor": "http:fetch"},
        {"type": "REST", "executor": "http:fetch", "method": "GET"},
        {"type": "BUILTIN", "executor": "http:fetch"},
        {"type": "BUILTIN", "executor": "http", "method": "GET", "endpoint": "https://a.example"},
    ],
)
@pytest.mark.parametrize("name", ["fetch_url", "my_fetch"])
def test_tool_definition_cannot_use_the_fetch_executor(fields: dict[str, Any], name: str) -> None:
    document = {"name": name, "description": "Fetch.", **fields}
    with pytest.raises(InvalidDefinition):
        Engine(tools=[document])


def rest_tool(upstream: Upstream) -> dict[str, Any]:
    return {
        "name": "ask", "type": "REST", "description": "Ask.", "method": "GET",
        "endpoint": f"{upstream.url}/now",
    }  # fmt: skip


async def test_fetch_cannot_reach_rest_tool_host_or_reuse_its_connection(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(home, rest=RestSettings(allowed_hosts=(upstream.authority,)))

    async def ask_then_fetch() -> Envelope:
        async with Engine(tools=[rest_tool(upstream)], config=settings) as engine:
            assert (await engine.call("ask")).success
            return await engine.call("fetch_url", {"url": f"{upstream.url}/admin"})

    refused = await ask_then_fetch()
    assert code(refused) == "PERMISSION_DENIED"
    assert "web.allowed_hosts" in refused.error.message
    assert upstream.count("/admin") == 0
    monkeypatch.setattr(Upstreams, "fetches", property(lambda self: self))  # control
    assert (await ask_then_fetch()).success
    assert upstream.count("/admin") == 1


async def test_redirect_to_local_host_is_refused(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_upstream() as inner:
        upstream.script("/out", redirect(f"{inner.url}/admin"))
        url, outer = f"{upstream.url}/out", upstream.authority
        assert code(await fetch(home, url, outer)) == "PERMISSION_DENIED"
        assert inner.connections == 0
        twin = await fetch(home, url, outer, inner.authority)
        assert twin.data["url"] == f"{inner.url}/admin"
        monkeypatch.setattr(addresses, "is_public", lambda address: True)  # control
        assert (await fetch(home, url, outer)).success
        assert inner.count("/admin") == 2


async def test_redirect_to_unsupported_scheme_or_user_info_is_refused(
    upstream: Upstream, home: Path
) -> None:
    async with Engine(config=config(home, upstream.authority)) as engine:
        for location in (
            "file:///etc/passwd", "gopher://127.0.0.1/", "http://me:pw@127.0.0.1:{port}/a",
        ):  # fmt: skip
            upstream.script("/out", redirect(location.format(port=upstream.port)))
            refused = await fetch_with(engine, f"{upstream.url}/out")
            assert code(refused) == "EXECUTION_ERROR", location
        assert [request.path for request in upstream.requests] == ["/out"] * 3
        upstream.script("/out", redirect("/a"))
        assert (await fetch_with(engine, f"{upstream.url}/out")).success  # twin


async def test_redirect_loop_ends_after_the_limit(upstream: Upstream, home: Path) -> None:
    upstream.script("/out", redirect("/out"))
    assert code(await fetch(home, f"{upstream.url}/out", upstream.authority)) == "EXECUTION_ERROR"
    assert upstream.count("/out") == 6


async def test_host_outside_only_hosts_is_refused_directly_and_by_redirect(
    upstream: Upstream, home: Path
) -> None:
    with running_upstream() as other:
        both = (upstream.authority, other.authority)
        upstream.script("/out", redirect(f"{other.url}/taken"))
        url, only = f"{upstream.url}/out", (upstream.authority,)
        for refused in (
            await fetch(home, f"{other.url}/taken", *both, only=only),
            await fetch(home, url, *both, only=only),
            await fetch(home, url, *both, only=()),
        ):
            assert code(refused) == "PERMISSION_DENIED"
        assert other.connections == 0
        assert (await fetch(home, url, *both, only=both)).success  # twin
        assert (await fetch(home, url, *both, only=None)).success  # control
        assert other.count("/taken") == 2


class Names:
    """A hostile domain's resolver with changing answers. No connection leaves this host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.connected: list[str] = []
        self._answers = list(answers)
        self._connect = httpcore2.AnyIOBackend.connect_tcp
        monkeypatch.setattr(socket, "getaddrinfo", self.resolve)
        names = self

        async def connect_tcp(self: Any, host: str, *others: Any, **more: Any) -> Any:
            names.connected.append(host)
            if host != "127.0.0.1":
                raise httpcore2.ConnectError
            return await names._connect(self, host, *others, **more)

        monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)

    def resolve(self, host: str, port: int, *others: Any, **more: Any) -> list[Any]:
        kind = socket.SOCK_STREAM
        return [(0, kind, 0, "", (address, port)) for address in self._answers.pop(0)]


async def test_name_resolving_to_local_address_is_refused(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://rebinding.example:{upstream.port}/admin"
    answers = ["127.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"]
    names = Names(monkeypatch, *answers)
    async with Engine(config=config(home)) as engine:
        for _ in range(2):
            assert code(await fetch_with(engine, url)) == "PERMISSION_DENIED"
    assert names.connected == []
    assert (await fetch(home, url, "rebinding.example")).success  # twin
    monkeypatch.setattr(addresses, "is_public", lambda address: True)  # control
    assert (await fetch(home, url)).success
    assert upstream.count("/admin") == 2


async def test_hanging_fetch_resolutions_do_not_block_rest_tool_resolution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    web, rest, over = CheckedBackend(), CheckedBackend(), threading.Event()
    hanging: list[str] = []

    def resolve(host: str | bytes, *others: Any, **more: Any) -> list[Any]:
        if b"slow" in (host if isinstance(host, bytes) else host.encode()):
            hanging.append(str(host))
            over.wait(BOUND_S)
        return [(0, socket.SOCK_STREAM, 0, "", ("1.1.1.1", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        async with anyio.create_task_group() as callers:
            for number in range(100):
                callers.start_soon(web.resolve, f"slow{number}.example", 443)
            await anyio.wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        with anyio.fail_after(BOUND_S / 2):
            assert await rest.resolve("api.example", 443) == [ip_address("1.1.1.1")]
        assert 0 < len(hanging) <= RESOLVED_AT_ONCE  # though their callers have gone
    finally:
        over.set()


async def test_dns_rebinding_after_check_does_not_change_connected_address(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch, ["1.1.1.1"], ["127.0.0.1"])
    url = f"http://rebinding.example:{upstream.port}/admin"
    async with Engine(config=config(home)) as engine:
        assert code(await fetch_with(engine, url)) == "NETWORK_ERROR"
        assert code(await fetch_with(engine, url)) == "PERMISSION_DENIED"
    assert names.connected == ["1.1.1.1"]
    assert upstream.connections == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: bomb(160),
        lambda: Reply(body=b"<p>" * (1 << 18), endless=True, content_type="text/html"),
        lambda: Reply(400, body=b"a" * (1 << 20), endless=True),
    ],
    ids=["gzip-bomb", "endless-body", "endless-error-body"],
)
async def test_oversized_page_is_refused_with_bounded_memory(
    make: Callable[[], Reply], upstream: Upstream, home: Path
) -> None:
    upstream.script("/page", await anyio.to_thread.run_sync(make))
    async with Engine(config=config(home, upstream.authority)) as engine:
        assert (await fetch_with(engine, f"{upstream.url}/other")).success  # twin
        before = psutil.Process().memory_info().rss
        refused = await fetch_with(engine, f"{upstream.url}/page")
        assert code(refused) in ("OUTPUT_LIMIT_EXCEEDED", "EXECUTION_ERROR")
        assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_fetch_never_sends_a_secret_even_if_bound_to_it(
    upstream: Upstream, home: Path
) -> None:
    (home / "secret").write_text(SECRET)
    (home / "secret").chmod(0o600)
    bound = {"tools": ("fetch_url", "ask"), "hosts": ("127.0.0.1",)}
    key = SecretSettings(file=home / "secret", **bound)
    rest = RestSettings(allowed_hosts=(upstream.authority,))
    settings = config(home, upstream.authority, rest=rest, secrets={"key": key})
    tool = {**rest_tool(upstream), "headers": {"authorization": "Bearer ${secret:key}"}}
    async with Engine(tools=[tool], config=settings) as engine:
        assert (await engine.call("ask")).success
        assert SECRET in str(upstream.requests.pop())  # twin
        placed = f"{upstream.url}/now?k=$%7Bsecret:key%7D"
        for url in (f"{upstream.url}/now", placed):
            assert (await engine.call("fetch_url", {"url": url})).success
    assert len(upstream.requests) == 2
    assert SECRET not in str(upstream.requests)
    sent = {name for request in upstream.requests for name in request.headers}
    assert sent == {"host", "accept-encoding", "accept", "user-agent"}
