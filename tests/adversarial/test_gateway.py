"""The gateway's boundary: each attack of the corpus, by programs in containers of both runtimes.

Each control lacks one defence, and the attacks that then succeed are listed exactly: seen from
outside, by listeners and a service on the host.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from fumehood.attack import gateway as target_module
from fumehood.attack.containers import container_target
from fumehood.attack.gateway import gateway_target
from fumehood.attack.run import run_attacks
from fumehood.attack.scorecard import Verdict
from fumehood.attack.targets import Standing
from fumehood.docker.api import Docker
from fumehood.gateway import door, proxy, request
from fumehood.gateway.placeholders import Placeholders
from fumehood.gateway.request import ProgramRequest
from fumehood.outgoing import addresses
from fumehood.outgoing.secret_values import SecretValues
from fumehood.policy.model import Decision
from fumehood.policy.model import Verdict as Decided
from support.nodes import cluster_wall
from support.wait import DEADLINE_S

pytestmark = [
    pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image"),
    pytest.mark.row("B4", "S3"),
]  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def failed(runtime: str = "runc", among: set[str] | None = None) -> dict[str, str]:
    """The ids of the attacks that succeeded, and why. None may be untried."""
    target = gateway_target(container_target(runtime, Docker(os.environ)))
    card = await run_attacks(
        [target],
        engine_version="test",
        choose=lambda attack: among is None or attack.is_quick or attack.id in among,
    )
    lines = card.walls[0].attacks
    assert len(lines) >= (14 if among is None else 5), card.walls[0].why
    assert [line.id for line in lines if line.verdict is Verdict.UNTRIED] == []
    return {line.id: line.why for line in lines if line.verdict is Verdict.FAILED}


# On gVisor only in the soak test: the gateway is the engine's. That there is no other way out of
# gVisor is in tests/integration/test_gateway.py.
@pytest.mark.parametrize(
    "runtime",
    ["runc", pytest.param("runsc", marks=[pytest.mark.needs("runsc"), pytest.mark.soak])],
)
async def test_gateway_holds_all_attacks(runtime: str) -> None:
    assert await failed(runtime) == {}


async def test_gateway_holds_all_attacks_by_programs_on_a_node(tmp_path: Path) -> None:
    """It stays with the engine; the node passes the connections' bytes on."""
    target = gateway_target(container_target("runc", Docker(os.environ)))

    @asynccontextmanager
    async def on_a_node() -> AsyncIterator[Standing]:
        async with cluster_wall(tmp_path, nodes=1) as wall, target.open() as standing:
            with anyio.fail_after(DEADLINE_S):
                while not wall.status.is_ready:
                    await anyio.sleep(0.05)
            yield replace(standing, wall=wall, containers=None)

    card = await run_attacks([replace(target, open=on_a_node)], engine_version="test")
    lines = card.walls[0].attacks
    assert {line.verdict for line in lines} == {Verdict.HELD}, card


def _all_hosts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(door, "network_matches", lambda *_: True)
    patch.setattr(addresses, "is_public", lambda address: True)


def _own_addresses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(addresses, "is_public", lambda address: True)


def _no_gate(patch: pytest.MonkeyPatch) -> None:
    allow = Decision(Decided.ALLOW, "rule:all")
    patch.setattr(target_module, "_by_default", lambda facts: allow)


def _bodies_are_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProgramRequest, "is_read", property(lambda self: self.method == "GET"))


def _no_redaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SecretValues, "add", lambda self, values: None)


def _only_what_was_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Placeholders, "_of_host",
        lambda self, request: [self._bound[p][0] for _, v in request.headers for p in self._of(v)],
    )  # fmt: skip


def _parts_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placeholders, "require_searchable", lambda self, request: None)
    patch.setattr(proxy, "_unsearchable", lambda status, headers: None)


def _names_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "_as_servers_read", lambda name: name)


def _placeholders_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placeholders, "misused", lambda self, request: None)


@pytest.mark.parametrize(
    ("weaken", "succeed"),
    [
        (_all_hosts, {"other-host", "private-name", "redirect"}),
        (_own_addresses, {"private-name"}),
        (
            _no_gate,
            {
                "write",
                "delete",
                "write-as-read",
                "overridden-method",
                "overridden-method-with-underscores",
            },
        ),
        (
            _bodies_are_reads,
            {"write-as-read", "overridden-method", "overridden-method-with-underscores"},
        ),
        (_names_as_they_are, {"overridden-method-with-underscores"}),
        (_no_redaction, {"echoed-secret", "stored-secret"}),
        (_only_what_was_sent, {"stored-secret", "secret-in-parts"}),
        (_parts_pass, {"secret-in-parts", "secret-in-parts-of-the-hosts-choice"}),
        (_placeholders_anywhere, {"secret-elsewhere", "secret-in-another-header"}),
    ],
)
async def test_control_without_a_defence_its_attacks_succeed(
    weaken: Callable[[pytest.MonkeyPatch], None],
    succeed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weaken(monkeypatch)
    found = await failed(among=succeed)
    assert found.keys() == succeed, found
