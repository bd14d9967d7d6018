"""Programs that serve many calls: which get the network, and which call is told of its use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood.core.errors import PermissionDenied, SandboxUnavailable, SandboxViolation
from fumehood.engine_part import EnginePart, around_lasting
from fumehood.executors.around import Given, LastingProgram, Surroundings
from fumehood.gateway.door import Door
from fumehood.gateway.in_engine import GatewayPart
from fumehood.gateway.placeholders import Placeholders
from fumehood.gateway.service import Gateway
from fumehood.gateway.settings import GatewaySettings
from fumehood.redaction.redactor import Redactor
from fumehood.sandbox.streams import Stream, StreamKind

pytestmark = [pytest.mark.anyio, pytest.mark.row("D5")]

UNUSED: Any = None
HOST = "api.example.test"


class FakeGateway(Gateway):
    """Opens real doors, to nowhere."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._open = is_open
        self.doors: list[Door] = []
        self.asked: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        return self._open

    @asynccontextmanager
    async def door(  # type: ignore[override]
        self, hosts: tuple[str, ...], ask: Any, redactor: Redactor, **facts: Any
    ) -> AsyncIterator[tuple[Door, Any]]:
        self.asked.append({"hosts": hosts, **facts})
        placeholders = Placeholders({}, (), UNUSED)
        door = Door(hosts, GatewaySettings(), UNUSED, ask, placeholders, UNUSED)
        self.doors.append(door)
        yield door, Stream(StreamKind("network"), UNUSED)


def part(*, is_open: bool = True) -> GatewayPart:
    made = GatewayPart(UNUSED)
    made.gateway = FakeGateway(is_open=is_open)
    return made


def program(*hosts: str) -> LastingProgram:
    return LastingProgram(id="mcp:a-b", tool="a_b", hosts=hosts, redactor=Redactor())


def requests_of(around: Surroundings) -> list[tuple[int, int]]:
    """The requests and refusals of which a call is told now."""
    reports = [share.sandbox["network"] for share in around.used() if share.sandbox]
    return [(one.requests, one.denied) for one in reports]


async def test_program_gets_the_network_that_its_settings_name() -> None:
    gateway = part()
    async with around_lasting(program(HOST), [EnginePart(UNUSED), gateway]) as around:
        (stream,) = around.streams
        assert stream.kind.name == "network"
        assert "HTTPS_PROXY" in around.environment
        assert isinstance(gateway.gateway, FakeGateway)
        (asked,) = gateway.gateway.asked
        door = gateway.gateway.doors[0]
        refused = await door._ask({}, UNUSED, UNUSED)
    assert isinstance(refused, PermissionDenied)
    assert asked == {
        "hosts": (HOST,), "tool": "a_b", "call_id": "mcp:a-b", "principal_id": "mcp:a-b",
        "agent_id": None, "session_id": None,
    }  # fmt: skip
    async with around_lasting(program(), [gateway]) as around:  # the twin
        assert (around.streams, around.environment, requests_of(around)) == ((), {}, [])


async def test_attack_program_without_the_part_that_it_needs_does_not_run() -> None:
    class Other(EnginePart):
        @asynccontextmanager
        async def around_lasting(self, program: LastingProgram) -> AsyncIterator[Given]:
            yield Given(needs=frozenset({"tools"}))

    with pytest.raises(SandboxUnavailable, match="network"):
        async with around_lasting(program(HOST), [Other(UNUSED)]):
            raise AssertionError
    with pytest.raises(PermissionDenied, match=r"gateway\.hosts names no host"):
        async with around_lasting(program(HOST), [part(is_open=False)]):
            raise AssertionError


async def test_use_is_told_once_to_the_next_call_through_all_starts() -> None:
    gateway = part()
    assert isinstance(gateway.gateway, FakeGateway)

    async def started(requests: int) -> Surroundings:
        async with around_lasting(program(HOST), [gateway]) as around:
            door = gateway.gateway.doors[-1]  # type: ignore[attr-defined]
            for _ in range(requests):
                door._count_host(HOST)
            door.refused(403, "PERMISSION_DENIED", "No.")
        return around

    first = await started(1)
    second = await started(2)
    assert requests_of(second) == [(3, 2)]
    assert requests_of(second) == requests_of(first) == [(0, 0)]
    async with around_lasting(program(HOST), [gateway]) as third:
        gateway.gateway.doors[-1]._count_host(HOST)
        assert [requests_of(third), requests_of(third)] == [[(1, 0)], [(0, 0)]]


async def test_attack_program_that_misuses_a_secret_is_ended_and_may_start_again() -> None:
    gateway = part()
    assert isinstance(gateway.gateway, FakeGateway)
    doors = gateway.gateway.doors

    async def misuse() -> None:
        async with around_lasting(program(HOST), [gateway]):
            doors[0].use.ended_for = "key"
            doors[0].use.scope.cancel()
            await anyio.sleep_forever()

    with pytest.raises(SandboxViolation, match="placeholder of a secret"):
        await misuse()
    async with around_lasting(program(HOST), [gateway]):
        await anyio.lowlevel.checkpoint()
        assert doors[1].use.ended_for is None
