"""Places are bounded for all, for each one, and in how many wait for them."""

from __future__ import annotations

import anyio
import pytest

from fumehood.core.errors import SandboxUnavailable
from fumehood.sandbox.process import slots as module
from fumehood.sandbox.process.slots import Slots

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def has_place(places: Slots, holder: object, who: str) -> bool:
    """Whether there is one without waiting."""
    with anyio.move_on_after(0):
        await places.take(holder, who)
        return True
    return False


@pytest.mark.row("S4")
async def test_one_principal_has_three_quarters_and_the_rest_is_for_others() -> None:
    places = Slots(8, "the wall")
    assert [await has_place(places, n, "alice") for n in range(8)] == [True] * 6 + [False] * 2
    assert [await has_place(places, n, "bob") for n in range(10, 13)] == [True, True, False]
    places.leave(0, "alice")
    assert await has_place(places, 12, "bob")
    assert not await has_place(places, 0, "alice")
    places.leave(12, "bob")
    assert await has_place(places, 0, "alice")


async def test_whoever_waits_gets_the_place_that_is_left() -> None:
    places = Slots(1, "the wall")
    await places.take("first", "alice")
    took = anyio.Event()

    async def wait() -> None:
        await places.take("second", "alice")
        took.set()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not took.is_set()
        places.leave("first", "alice")
        await took.wait()
    places.leave("second", "alice")
    assert await has_place(places, "third", "bob")


async def test_whoever_gives_up_leaves_nothing_taken() -> None:
    places = Slots(2, "the wall")
    await places.take(1, "alice")
    await places.take(2, "alice")
    for number in range(3, 6):
        assert not await has_place(places, number, "bob")
        assert not await has_place(places, number, "alice")
    places.leave(1, "alice")
    places.leave(2, "alice")
    assert [await has_place(places, number, "bob") for number in (1, 2)] == [True, True]


@pytest.mark.row("S4")
async def test_one_principal_never_has_all_that_there_is_to_wait_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    places = Slots(1, "the wall")
    await places.take("held", "alice")

    async def refused(holder: object, who: str) -> None:
        with pytest.raises(SandboxUnavailable, match="Too many calls wait for the wall"):
            await places.take(holder, who)

    async with anyio.create_task_group() as group:
        for number in range(2):
            group.start_soon(places.take, ("alice", number), "alice")
        await anyio.wait_all_tasks_blocked()
        await refused("one more", "alice")
        for number in range(2):
            group.start_soon(places.take, ("bob", number), f"bob-{number}")
        await anyio.wait_all_tasks_blocked()
        await refused("one more", "carol")
        group.cancel_scope.cancel()


async def test_shares_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNUSED_SHARES", 3)
    places = Slots(8, "the wall")
    await places.take(0, "alice")
    for number in range(1, 20):
        await places.take(number, f"other-{number}")
        places.leave(number, f"other-{number}")
    assert len(places._shares) <= 4
    places.leave(0, "alice")
