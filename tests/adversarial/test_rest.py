"""Attacks through REST tools on local addresses and on secrets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine, Envelope
from fumehood.executors import upstreams
from fumehood.gateway import addresses
from fumehood.registry.secrets import RestSettings, SecretSettings
from fumehood.testing import FakeWall
from support.attacks import Harm
from upstream import Upstream, redirect, running_upstream

pytestmark = [pytest.mark.anyio, pytest.mark.row("T5", "S1")]

SECRET = "canary-51c0-secret-of-a-tool"


async def call(
    home: Path,
    endpoint: str,
    allowed: tuple[str, ...],
    headers: dict[str, str] | None = None,
    **arguments: Any,
) -> Envelope:
    """Make one call of a REST tool with a secret, in a separate engine."""
    (home / "secret").write_text(SECRET)
    (home / "secret").chmod(0o600)
    key = SecretSettings(file=home / "secret", tools=("ask",), hosts=("127.0.0.1",))
    config = Config(home=home, rest=RestSettings(allowed_hosts=allowed), secrets={"key": key})
    tool = {
        "name": "ask",
        "type": "REST",
        "description": "Ask.",
        "method": "GET",
        "endpoint": endpoint,
        "headers": headers or {},
        "parameters": {"properties": {"q": {"type": "string"}}},
    }
    async with Engine(tools=[tool], config=config, interpreter=FakeWall()) as engine:
        return await engine.call("ask", arguments)


@dataclass(frozen=True)
class AddressAttack:
    """A spelling of this host's address that other parsers may take for a public one."""

    name: str
    harm: Harm
    host: str


ATTACKS = (
    AddressAttack("loopback", Harm.LATERAL, "127.0.0.1"),
    AddressAttack("loopback-short", Harm.LATERAL, "127.1"),
    AddressAttack("loopback-decimal", Harm.LATERAL, "2130706433"),
    AddressAttack("loopback-hexadecimal", Harm.LATERAL, "0x7f000001"),
    AddressAttack("loopback-octal", Harm.LATERAL, "017700000001"),
    AddressAttack("unspecified", Harm.LATERAL, "0.0.0.0"),
    AddressAttack("unspecified-short", Harm.LATERAL, "0"),
    AddressAttack("mapped", Harm.LATERAL, "[::ffff:127.0.0.1]"),
    AddressAttack("mapped-hexadecimal", Harm.LATERAL, "[::ffff:7f00:1]"),
    AddressAttack("name", Harm.LATERAL, "localhost"),
    AddressAttack("name-with-dot", Harm.LATERAL, "localhost."),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_rest_call_to_local_host_is_refused_in_any_spelling(
    attack: AddressAttack, upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://{attack.host}:{upstream.port}/admin"
    refused = await call(home, endpoint, allowed=())
    assert refused.error is not None
    assert refused.error.code == "PERMISSION_DENIED"
    assert upstream.connections == 0
    monkeypatch.setattr(addresses, "is_public", lambda address: True)  # control
    assert (await call(home, endpoint, allowed=())).success
    assert upstream.count("/admin") == 1


async def test_rest_redirect_to_local_host_is_refused(
    upstream: Upstream, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_upstream() as inner:
        upstream.script("/out", redirect(f"{inner.url}/admin"))
        endpoint, allowed = f"{upstream.url}/out", (upstream.authority,)
        refused = await call(home, endpoint, allowed)
        assert refused.error is not None
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
