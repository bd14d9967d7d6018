"""Places are bounded for all, for each one, and in how many wait for them."""

from __future__ import annotations

import anyio
import pytest

from fumehood.core.errors import SandboxUnavailable
from fumehood.sandbox import wall as module
from fumehood.sandbox.wall import Slots

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def has_place(places: Slots, who: str) -> bool:
    """Whether there is one without waiting."""
    with anyio.move_on_after(0):
        await places.take(who)
        return True
    return False


@pytest.mark.row("S4")
async def test_one_principal_takes_at_most_three_quarters_of_the_slots() -> None:
    places = Slots(8, "the wall")
    assert [await has_place(places, "alice") for _ in range(8)] == [True] * 6 + [False] * 2
    assert [await has_place(places, "bob") for _ in range(3)] == [True, True, False]
    places.leave("alice")
    assert await has_place(places, "bob")
    assert not await has_place(places, "alice")
    places.leave("bob")
    assert await has_place(places, "alice")


async def test_cancelled_wait_leaves_no_slot_taken() -> None:
    places = Slots(2, "the wall")
    await places.take("alice")
    await places.take("alice")
    for _ in range(3):
        assert not await has_place(places, "bob")
        assert not await has_place(places, "alice")
    places.leave("alice")
    places.leave("alice")
    assert [await has_place(places, "bob") for _ in range(2)] == [True, True]


@pytest.mark.row("S4")
async def test_one_principal_cannot_fill_the_waiting_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    places = Slots(1, "the wall")
    await places.take("alice")

    async def refused(who: str) -> None:
        with pytest.raises(SandboxUnavailable, match="Too many calls wait for the wall"):
            await places.take(who)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(places.take, "alice")
        await anyio.wait_all_tasks_blocked()
        await refused("alice")
        for number in range(2):
            group.start_soon(places.take, f"bob-{number}")
        await anyio.wait_all_tasks_blocked()
        await refused("carol")
        group.cancel_scope.cancel()
