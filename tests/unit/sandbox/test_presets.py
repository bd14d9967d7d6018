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


@asynccontextmanager
async def keeping(wall: FakeWall | None = None) -> AsyncIterator[SessionKeeper]:
    clock = ManualClock()
    async with SessionKeeper(
        wall or FakeWall(limits=CONTAINER_LIMITS),
        SessionRows(),
        SessionSettings(image="python"),
        SessionClock(clock.now, clock.monotonic),
        lambda principal, agent_id: None,
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
        ({"preset": "smal"}, "preset", "There is no preset 'smal'. Did you mean 'small'?"),
        ({"preset": "x" * 1000}, "preset", f"There is no preset '{'x' * 80}'."),
        ({"preset": "huge", "name": "A"}, "name", "A session's name matches"),
        (
            {"preset": "huge", "name": "a"},
            "preset",
            "The preset huge cannot be used here: memory_mb must",
        ),
        ({"preset": "huge", "memory_mb": 10_000}, "memory_mb", "memory_mb must be from 128 to"),
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
