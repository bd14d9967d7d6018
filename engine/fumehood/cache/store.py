"""The result cache's store: answers by key, and one run for identical simultaneous calls.

Host side. A full cache drops the least recently used answers. Answers are kept as JSON, so that the
caller of one call cannot change what later callers receive. A call that finds no answer becomes a
*flight*. Identical calls wait for the flight. If it ends without an answer, exactly one of the
waiting calls becomes the next flight. Invariants: the answers together never exceed the size limit;
a flight that ends after `clear` stores nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pydantic_core import to_json

from fumehood.cache.settings import CacheSettings
from fumehood.core.call import CallOptions
from fumehood.core.envelope import Metacognition
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.core.status import CacheStatus, ClearedCache
from fumehood.protocol import strict_json
from fumehood.protocol.canonical import digest_of
from fumehood.registry.index import RegisteredTool

MAX_ARGUMENT_BYTES = 64 * 1024
"""Maximum size of the arguments of cached calls, in bytes. To hash this much takes about 5 ms on
the event loop."""

MAX_REMEMBERED = 512
"""Maximum number of keys that `CacheKeys` remembers, and maximum number of tool digests."""


class CacheKeys:
    """Computes the keys of one engine's answers, and remembers recently computed keys."""

    def __init__(self) -> None:
        self._key = lru_cache(MAX_REMEMBERED)(_key)
        self._digests: dict[int, tuple[RegisteredTool, str]] = {}
        """`id(tool)` → the tool and its digest. The tool is kept so that its id cannot be
        reused."""

    def key(
        self,
        tool: RegisteredTool,
        digest_of_tool: Callable[[RegisteredTool], str],
        arguments: JsonObject,
        principal_id: str,
        options: CallOptions,
    ) -> str | None:
        """Return the cache key of a call. Return None if its arguments are too long or cannot be
        written as canonical JSON.

        `digest_of_tool` computes the hash of a tool's definition and code.
        """
        try:
            text = to_json(arguments)
        except ValueError:
            return None
        if len(text) > MAX_ARGUMENT_BYTES:
            return None
        definition = self._digest(tool, digest_of_tool)
        chosen = options.agent_id, options.return_summary, options.max_length
        return self._key(definition, text, principal_id, *chosen)

    def _digest(self, tool: RegisteredTool, make: Callable[[RegisteredTool], str]) -> str:
        """Return a tool's digest, which is computed only once for each registration."""
        found = self._digests.get(id(tool))
        if found is None:
            if len(self._digests) >= MAX_REMEMBERED:
                self._digests.clear()
            found = self._digests[id(tool)] = tool, make(tool)
        return found[1]


def _key(
    definition: str,
    arguments: bytes,
    principal_id: str,
    agent_id: str | None,
    return_summary: bool,
    max_length: int | None,
) -> str | None:
    try:
        return digest_of(
            {
                "definition": definition,
                "arguments": strict_json.loads(arguments),
                "principal": principal_id,
                "agent": agent_id,
                "return_summary": return_summary,
                "max_length": max_length,
            }
        )
    except ValueError:
        return None


ENTRY_BYTES = 1024
"""Estimated memory in bytes that an entry needs in addition to the answer: its key, its times and
their objects."""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A stored successful result. `expires` is a time of the monotonic clock."""

    data: bytes
    warnings: tuple[str, ...]
    """Warnings of the run itself. Warnings about the call's arguments or options are omitted."""
    cached_at: str
    expires: float
    redacted: int = 0
    metacognition: Metacognition | None = None

    @property
    def size_bytes(self) -> int:
        """An upper estimate of the memory that this answer needs, in bytes."""
        return ENTRY_BYTES + len(self.data) + sum(map(len, self.warnings)) * 4


class Flight:
    """A running call for whose answer identical calls wait. The first call of `land` or `close`
    ends the flight.
    """

    __slots__ = ("_cache", "_key", "answer", "over")

    def __init__(self, cache: ResultCache, key: str) -> None:
        self._cache = cache
        self._key = key
        self.answer: CachedAnswer | None = None
        self.over = asyncio.Event()

    def land(
        self,
        data: bytes,
        warnings: tuple[str, ...],
        *,
        at: str,
        ttl_seconds: int | None,
        is_kept: bool,
        redacted: int = 0,
        metacognition: Metacognition | None = None,
    ) -> None:
        """End the flight with an answer, which waiting calls receive. If `is_kept`, the answer is
        also stored for later calls.
        """
        if not self.over.is_set():
            expires = self._cache.expiry(ttl_seconds)
            self.answer = CachedAnswer(data, warnings, at, expires, redacted, metacognition)
            self._cache.end(self, self._key, is_kept=is_kept)

    def close(self) -> None:
        """End the flight without an answer, unless it has already ended. One of the waiting calls
        then runs instead.
        """
        if not self.over.is_set():
            self._cache.end(self, self._key, is_kept=False)


class ResultCache:
    """The cached answers and the flights of one engine."""

    def __init__(self, settings: CacheSettings, monotonic: Callable[[], float]) -> None:
        self.keys = CacheKeys()
        self._settings = settings
        self._monotonic = monotonic
        self._max_bytes = settings.max_mb * MB
        self._entries: OrderedDict[str, CachedAnswer] = OrderedDict()
        self._flights: dict[str, Flight] = {}
        self._size_bytes = 0
        self._hits = self._misses = self._evicted = 0

    def find(self, key: str) -> CachedAnswer | None:
        """Return the stored answer for this key, or None if there is none or it has expired."""
        answer = self._entries.get(key)
        if answer is None:
            return None
        if answer.expires <= self._monotonic():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        self._hits += 1
        return answer

    async def take(self, key: str, wait_s: Callable[[], float]) -> CachedAnswer | Flight:
        """Return the answer for this key. If there is none, return a new flight, and the caller
        must run the call.

        If an identical call is already running, wait for its answer first, at most `wait_s()`
        seconds.

        Raises:
            TimeoutError: identical calls took longer than this.
        """
        answer = self.find(key)
        if answer is not None:
            return answer
        if key in self._flights:
            async with asyncio.timeout(wait_s()):
                answer = await self._of_others(key)
        if answer is not None:
            return answer
        self._misses += 1
        flight = self._flights[key] = Flight(self, key)
        return flight

    def status(self) -> CacheStatus:
        """Return the current size of the cache, and its hits, misses and evictions since the
        engine's start.
        """
        now = self._monotonic()
        for key in [key for key, answer in self._entries.items() if answer.expires <= now]:
            self._drop(key)
        return CacheStatus(
            entries=len(self._entries),
            size_bytes=self._size_bytes,
            max_bytes=self._max_bytes,
            running=len(self._flights),
            hits=self._hits,
            misses=self._misses,
            evicted=self._evicted,
        )

    def clear(self) -> ClearedCache:
        """Drop every answer.

        The answer of a running call goes only to calls that already wait for it.
        """
        cleared = len(self._entries)
        self._entries.clear()
        self._flights.clear()
        self._size_bytes = 0
        return ClearedCache(cleared=cleared)

    def expiry(self, ttl_seconds: int | None) -> float:
        """Return the time of the monotonic clock at which a new answer expires. If `ttl_seconds` is
        None, the default of the settings applies.
        """
        ttl_s = self._settings.ttl_seconds if ttl_seconds is None else ttl_seconds
        return self._monotonic() + ttl_s

    def end(self, flight: Flight, key: str, *, is_kept: bool) -> None:
        """End a flight, store its answer if `is_kept`, and wake the calls that wait for it.

        Only `Flight` calls this method.
        """
        if self._flights.get(key) is flight:
            del self._flights[key]
            if is_kept and flight.answer is not None:
                self._keep(key, flight.answer)
        flight.over.set()

    async def _of_others(self, key: str) -> CachedAnswer | None:
        """Wait for identical calls that are running. Return an answer, or None if all of them end
        without one.
        """
        while (flight := self._flights.get(key)) is not None:
            await flight.over.wait()
            if flight.answer is not None:
                self._hits += 1
                return flight.answer
            answer = self.find(key)  # another flight may have stored an answer meanwhile
            if answer is not None:
                return answer
        return None

    def _keep(self, key: str, answer: CachedAnswer) -> None:
        size_bytes = answer.size_bytes
        if size_bytes > min(self._max_bytes, self._settings.max_entry_kb * 1024 + ENTRY_BYTES):
            return
        self._entries[key] = answer
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self._evicted += 1

    def _drop(self, key: str) -> None:
        self._size_bytes -= self._entries.pop(key).size_bytes
