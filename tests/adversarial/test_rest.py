"""Attacks through REST tools on local addresses and on secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine, Envelope
from fumehood.outgoing import addresses, upstreams
from fumehood.registry.secrets import RestSettings, SecretSettings
from fumehood.registry.settings import WebToolSettings
from fumehood.testing import FakeWall
from support.attacks import LOCAL_HOSTS
from upstream import Reply, Upstream, redirect, running_upstream

pytestmark = [pytest.mark.anyio, pytest.mark.row("T5", "S1")]

SECRET = "canary-51c0-secret-of-a-tool"


async def call(
    home: Path,
    endpoint: str,
    allowed: tuple[str, ...],
    headers: dict[str, str] | None = None,
) -> Envelope:
    """Make one call of a REST tool with a secret, in a separate engine."""
    (home / "secret").write_text(SECRET)
    (home / "secret").chmod(0o600)
    key = SecretSettings(file=home / "secret", tools=("ask",), hosts=("127.0.0.1",))
    config = Config(home=home, rest=RestSettings(allowed_hosts=allowed), secrets={"key": key})
    tools = [tool("ask", endpoint, headers)]
    async with Engine(tools=tools, config=config, interpreter=FakeWall()) as engine:
        return await engine.call("ask")


def tool(name: str, endpoint: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "name": name, "type": "REST", "description": "Ask.", "method": "GET",
        "endpoint": endpoint, "headers": headers or {},
    }  # fmt: skip


async def test_attack_secret_that_a_host_stored_is_in_no_later_answer(
    upstream: Upstream, home: Path
) -> None:
    """The tools that ask have no secret, and none was read before. Twin: of another host, the
    answers are as they are.
    """
    upstream.script("/kept", Reply(body=f'{{"kept": "{SECRET}"}}'.encode()))
    upstream.script("/part", Reply(206, body=SECRET[:9].encode(), content_type="text/plain"))
    (home / "secret").write_text(SECRET)
    (home / "secret").chmod(0o600)
    key = SecretSettings(file=home / "secret", tools=("other",), hosts=("127.0.0.1:443",))
    here = ("127.0.0.1", "localhost")
    config = Config(
        home=home, rest=RestSettings(allowed_hosts=here), secrets={"key": key},
        web=WebToolSettings(fetch_url=True, allowed_hosts=here),
    )  # fmt: skip
    tools = [
        tool(f"{name}_{path}", f"http://{host}:{upstream.port}/{path}", {"range": "bytes=0-8"})
        for name, host in (("ask", "127.0.0.1"), ("twin", "localhost"))
        for path in ("kept", "part")
    ]
    url = f"http://127.0.0.1:{upstream.port}"
    async with Engine(tools=tools, config=config, interpreter=FakeWall()) as engine:
        kept = [
            (await engine.call("ask_kept")).data["kept"],
            (await engine.call("twin_kept")).data["kept"],
            (await engine.call("fetch_url", {"url": f"{url}/kept"})).data["json"]["kept"],
            (await engine.call("fetch_url", {"url": f"{url.replace('127.0.0.1', 'localhost')}/kept"}))
            .data["json"]["kept"],
        ]  # fmt: skip
        part, whole = await engine.call("ask_part"), await engine.call("twin_part")
    assert kept == ["[redacted]", SECRET, "[redacted]", SECRET]
    assert part.error is not None
    assert "a part of its answer" in part.error.message
    assert whole.data["text"] == SECRET[:9]


async def test_rest_call_to_local_host_is_refused_in_any_spelling(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"ask_{number}" for number in range(len(LOCAL_HOSTS))]
    tools = [
        tool(name, f"http://{host}:{upstream.port}/admin")
        for name, host in zip(names, LOCAL_HOSTS, strict=True)
    ]
    async with Engine(tools=tools, config=Config(home=home), interpreter=FakeWall()) as engine:
        for name in names:
            refused = await engine.call(name)
            assert refused.error is not None, name
            assert refused.error.code == "PERMISSION_DENIED", name
        assert upstream.connections == 0
        monkeypatch.setattr(addresses, "is_public", lambda address: True)  # control
        for name in names:
            assert (await engine.call(name)).success, name
    assert upstream.count("/admin") == len(names)


async def test_rest_redirect_to_local_host_is_refused(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_upstream() as inner:
        upstream.script("/out", redirect(f"{inner.url}/admin"))
        endpoint, allowed = f"{upstream.url}/out", (upstream.authority,)
        refused = await call(home, endpoint, allowed)
        assert refused.error.code == "PERMISSION_DENIED"
        assert inner.connections == 0
        assert (await call(home, endpoint, (*allowed, inner.authority))).success  # twin
        monkeypatch.setattr(addresses, "is_public", lambda address: True)  # control
        assert (await call(home, endpoint, allowed)).success
        assert inner.count("/admin") == 2


async def test_redirect_does_not_forward_secret_headers_to_another_host(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"authorization": "Bearer ${secret:key}"}
    with running_upstream() as other:
        upstream.script("/out", redirect(f"{other.url}/taken"))
        allowed = (upstream.authority, other.authority)
        assert (await call(home, f"{upstream.url}/out", allowed, headers)).success
        assert SECRET not in str(other.requests)
        assert SECRET in str(upstream.requests)
        keep = upstreams.replace

        def without_defence(value: Any, **changes: Any) -> Any:
            changes.pop("secret_headers", None)
            return keep(value, **changes)

        monkeypatch.setattr(upstreams, "replace", without_defence)  # control
        assert (await call(home, f"{upstream.url}/out", allowed, headers)).success
        assert SECRET in str(other.requests)
