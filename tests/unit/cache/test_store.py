"""The store of answers: bounds, expiry, and one run for equal calls."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.cache.settings import CacheSettings
from fumehood.cache.store import ENTRY_BYTES, CachedAnswer, Flight, ResultCache
from fumehood.core.limits import MB
from fumehood.testing import ManualClock

pytestmark = [pytest.mark.anyio, pytest.mark.row("P4")]

AT = "2026-01-01T00:00:00.000Z"


def make(clock: ManualClock | None = None, **settings: int) -> ResultCache:
    return ResultCache(CacheSettings(**settings), (clock or ManualClock()).monotonic)


def a_minute() -> float:
    return 60.0


async def lead(cache: ResultCache, key: str = "k") -> Flight:
    """A flight of the only call with this key."""
    found = await cache.take(key, a_minute)
    assert isinstance(found, Flight)
    return found


async def led() -> tuple[ResultCache, Flight]:
    """A cache with a flight."""
    cache = make()
    return cache, await lead(cache)


def land(flight: Flight, data: bytes = b"{}", *, is_kept: bool = True, ttl: int = 60) -> None:
    flight.land(data, (), at=AT, ttl_seconds=ttl, is_kept=is_kept)


async def put(cache: ResultCache, key: str, data: bytes = b"{}", ttl: int = 60) -> None:
    land(await lead(cache, key), data, ttl=ttl)


def has(cache: ResultCache, key: str) -> bool:
    """Whether an answer is kept, without using it."""
    return key in cache._entries


async def test_cached_answer_is_found_until_it_expires() -> None:
    clock = ManualClock()
    cache = make(clock)
    await put(cache, "k", b'{"a":1}', ttl=10)
    clock.advance(9.5)
    found = await cache.take("k", a_minute)
    assert isinstance(found, CachedAnswer)
    assert (found.data, found.cached_at) == (b'{"a":1}', AT)
    assert found.expires - clock.monotonic() == 0.5
    clock.advance(0.5)
    assert isinstance(await cache.take("k", a_minute), Flight)
    assert cache.status().size_bytes == 0


async def test_least_recently_used_answer_goes_first() -> None:
    cache = make(max_mb=1)
    size = MB // 3 - ENTRY_BYTES
    for key in "abc":
        await put(cache, key, b"x" * size)
    assert isinstance(await cache.take("a", a_minute), CachedAnswer)
    await put(cache, "d", b"x" * size)
    assert [key for key in "abcd" if has(cache, key)] == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("settings", "size", "is_kept"),
    [
        ({"max_entry_kb": 4}, 4096, True),
        ({"max_entry_kb": 4}, 4097, False),
        ({"max_mb": 1, "max_entry_kb": 4096}, MB - ENTRY_BYTES, True),
        ({"max_mb": 1, "max_entry_kb": 4096}, MB, False),
        ({"max_mb": 0}, 0, False),
    ],
)
async def test_oversized_answer_is_not_cached_and_evicts_nothing(
    settings: dict[str, int], size: int, is_kept: bool
) -> None:
    cache = make(**settings)
    await put(cache, "k", b"x" * size)
    assert has(cache, "k") is is_kept
    assert cache.status().evicted == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400_000), st.integers(1, 50))))
async def test_cache_sizes_add_up_and_never_exceed_the_bound(
    steps: list[tuple[int, int, int]],
) -> None:
    clock = ManualClock()
    cache = make(clock, max_mb=1)
    for key, size, ttl in steps:
        found = await cache.take(str(key), a_minute)
        if isinstance(found, Flight):
            land(found, b"x" * size, ttl=ttl)
        clock.advance(1)
        held = sum(answer.size_bytes for answer in cache._entries.values())
        assert held == cache._size_bytes <= MB
        assert not cache._flights


async def test_one_waiting_call_runs_after_a_failure() -> None:
    cache, flight = await led()
    calls = [asyncio.create_task(cache.take("k", a_minute)) for _ in range(20)]
    await asyncio.sleep(0)
    flight.close()
    woken, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    (found,) = [call.result() for call in woken]
    assert isinstance(found, Flight)
    land(found)
    answers = await asyncio.gather(*calls)
    assert sum(isinstance(one, CachedAnswer) for one in answers) == 19


async def test_waiter_cancelled_when_chosen_to_run_hands_over() -> None:
    cache, flight = await led()
    first, second = (asyncio.create_task(cache.take("k", a_minute)) for _ in range(2))
    await asyncio.sleep(0)
    flight.close()
    first.cancel()  # it has been woken, and has not run yet
    with pytest.raises(asyncio.CancelledError):
        await first
    assert isinstance(await second, Flight)


async def test_run_started_before_a_clear_is_not_cached_but_answers_waiters() -> None:
    cache = make()
    await put(cache, "old")
    flight = await lead(cache)
    waiting = asyncio.create_task(cache.take("k", a_minute))
    await asyncio.sleep(0)
    assert cache.clear().cleared == 1
    later = await lead(cache)
    land(flight, b'{"before":1}')
    answer = await waiting
    assert isinstance(answer, CachedAnswer)
    assert answer.data == b'{"before":1}'
    assert not has(cache, "k")
    land(later)
    assert has(cache, "k")
