"""Presets: what a session gets from its preset, from its request, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fumehood.core.errors import EngineError
from fumehood.core.identity import Principal
from fumehood.sandbox.sessions import SessionClock, SessionKeeper
from fumehood.sandbox.settings import Preset, SessionSettings
from fumehood.testing import CONTAINER_LIMITS, FakeWall, ManualClock
from support.session_rows import SessionRows

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6")]

ALICE = Principal("alice")
PRESETS = {
    "small": Preset(
        image="shell",
        memory_mb=256,
        cpus=2,
        network=("a.example",),
        env={"A": "1", "B": "2"},
        idle_seconds=60,
        lifetime_seconds=600,
        packages=["humanize"],
    ),
    "plain": Preset(),
    "huge": Preset(memory_mb=16_384),
}
BOUND = {"clerk": ["small", "plain"]}


@asynccontextmanager
async def keeping(wall: FakeWall | None = None) -> AsyncIterator[SessionKeeper]:
    clock = ManualClock()
    async with SessionKeeper(
        wall or FakeWall(limits=CONTAINER_LIMITS),
        SessionRows(),
        SessionSettings(image="python"),
        SessionClock(clock.now, clock.monotonic),
        lambda principal, agent_id: BOUND.get(agent_id or "", ()),
        presets=PRESETS,
    ) as keeper:
        yield keeper


async def test_session_has_the_fields_of_its_preset_and_those_of_the_request_win() -> None:
    async with keeping() as keeper:
        made = await keeper.create(ALICE, preset="small")
        assert (made.preset, made.image, made.memory_mb, made.cpus) == ("small", "shell", 256, 2)
        assert (made.network, made.env) == (("a.example",), ("A", "B"))
        assert (made.expires_at - made.created_at).total_seconds() == 60
        own = await keeper.create(
            ALICE, preset="small", image="node", memory_mb=512, network=["b.example", "a.example"],
            env={"B": "own", "C": "3"},
        )  # fmt: skip
        assert (own.image, own.memory_mb, own.cpus) == ("node", 512, 2)
        assert own.network == ("a.example", "b.example")
        assert own.env == ("A", "B", "C")
        plain = await keeper.create(ALICE)
        assert (plain.preset, plain.image, plain.env) == (None, "python", ())


async def test_only_variables_that_differ_from_the_preset_count_as_the_owners() -> None:
    async with keeping() as keeper:
        made = await keeper.create(ALICE, preset="small", env={"B": "own", "A": "1"})
        assert keeper.own_env(ALICE, made.id) == {"B": "own"}
        assert keeper.own_env(Principal("bob"), made.id) == {}


@pytest.mark.parametrize(
    ("wishes", "field", "said"),
    [
        ({"preset": "smal"}, "preset", "There is no preset 'smal'. Configured presets: "),
        ({"preset": "x" * 1000}, "preset", f"There is no preset '{'x' * 80}'. "),
        ({"preset": "huge"}, "memory_mb", "memory_mb must be from 128 to"),
        ({"preset": "small", "env": {"D": "x" * 70_000}}, "env", "env has more than 65536 bytes"),
    ],
)
async def test_preset_that_is_unknown_or_cannot_be_had_here_is_refused(
    wishes: dict[str, Any], field: str, said: str
) -> None:
    wall = FakeWall(limits=CONTAINER_LIMITS, host_memory_mb=32_768)
    async with keeping(wall) as keeper:
        with pytest.raises(EngineError) as caught:
            await keeper.create(ALICE, **wishes)
        assert (caught.value.code, caught.value.fields) == ("INVALID_PARAMS", (field,))
        assert caught.value.message.startswith(said)
        assert wall.held == []


# -- agents that are bound to presets ------------------------------------------------------


async def test_session_of_a_bound_agent_has_the_agents_first_preset_or_another_of_its() -> None:
    async with keeping() as keeper:
        first = await keeper.create(ALICE, agent_id="clerk")
        assert (first.preset, first.memory_mb) == ("small", 256)
        other = await keeper.create(ALICE, agent_id="clerk", preset="plain")
        assert (other.preset, other.memory_mb) == ("plain", 512)
        less = await keeper.create(
            ALICE, agent_id="clerk", image="shell", memory_mb=128, cpus=1, packages=[], env={"C": ""},
            network=["a.example"], durable=False, idle_seconds=10, lifetime_seconds=600,
        )  # fmt: skip
        assert (less.preset, less.memory_mb, less.env) == ("small", 128, ("A", "B", "C"))
        free = await keeper.create(ALICE, agent_id="writer", memory_mb=1024)  # control
        assert (free.preset, free.memory_mb) == (None, 1024)


@pytest.mark.parametrize(
    ("wishes", "fields"),
    [
        ({"preset": "huge"}, ("preset",)),
        ({"preset": "none"}, ("preset",)),
        ({"image": "python"}, ("image",)),
        ({"memory_mb": 512}, ("memory_mb",)),
        ({"cpus": 2.5}, ("cpus",)),
        ({"preset": "plain", "cpus": 0.5}, ("cpus",)),
        ({"disk_mb": 16}, ("disk_mb",)),
        ({"packages": ["humanize", "rich"]}, ("packages",)),
        ({"network": ["b.example"]}, ("network",)),
        ({"network": ["*.a.example"]}, ("network",)),
        ({"durable": True}, ("durable",)),
        ({"idle_seconds": 61}, ("idle_seconds",)),
        ({"lifetime_seconds": 601, "memory_mb": 512}, ("memory_mb", "lifetime_seconds")),
    ],
)
async def test_bound_agent_is_refused_whatever_its_preset_does_not_give(
    wishes: dict[str, Any], fields: tuple[str, ...]
) -> None:
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with keeping(wall) as keeper:
        with pytest.raises(EngineError) as caught:
            await keeper.create(ALICE, agent_id="clerk", **wishes)
        assert (caught.value.code, caught.value.fields) == ("PERMISSION_DENIED", fields)
        assert caught.value.message.startswith("The agent clerk is bound to presets: small, plain.")
        assert wall.held == []
