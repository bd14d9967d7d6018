"""The store of the result cache: it keeps answers by key, and lets identical calls share one run.

Host side. A full cache drops the least recently used answers. Answers are kept as JSON, so that one
caller cannot change what later callers receive. A call that finds no answer becomes a *flight*: it
runs, and identical calls wait for its answer. If the flight ends without an answer, exactly one of
the waiting calls becomes the next flight. Invariants: all answers together never exceed the size
limit; a flight that was running when `clear` was called stores nothing.
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
"""Maximum size in bytes of the arguments of a call that uses the cache. Hashing arguments of this
size blocks the event loop for about 5 ms.
"""

MAX_REMEMBERED = 512
"""Maximum number of keys that `CacheKeys` remembers. The same maximum applies to the digests of
tools.
"""


class CacheKeys:
    """Computes the keys under which answers are stored, and remembers those that it computed
    recently.
    """

    def __init__(self) -> None:
        self._key = lru_cache(MAX_REMEMBERED)(_key)
        self._digests: dict[int, tuple[RegisteredTool, str]] = {}
        """`id(tool)` → the tool and its digest. The entry keeps the tool alive, so that no other
        object gets the same id.
        """

    def key(
        self,
        tool: RegisteredTool,
        digest_of_tool: Callable[[RegisteredTool], str],
        arguments: JsonObject,
        principal_id: str,
        options: CallOptions,
    ) -> str | None:
        """Return the key under which the answer of a call is stored. Return None if the arguments
        are too long, or cannot be written as canonical JSON.

        `digest_of_tool` computes the hash of a tool's definition and code. `options` are the
        options of the call.
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
        """Return the digest of a tool. `make` computes it, only once for each registered tool."""
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
"""Estimated memory in bytes that an answer needs besides its data and warnings: for its key, its
times and the Python objects.
"""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A successful result in the cache. `expires` is a time of the monotonic clock, in seconds."""

    data: bytes
    warnings: tuple[str, ...]
    """The warnings of the run itself. Warnings about the arguments or options of the call are left
    out.
    """
    cached_at: str
    expires: float
    redacted: int = 0
    metacognition: Metacognition | None = None

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory in bytes that this answer needs. The real size is not
        larger.
        """
        return ENTRY_BYTES + len(self.data) + sum(map(len, self.warnings)) * 4


class Flight:
    """A running call, whose answer identical calls wait for. The first call of `land` or `close`
    ends the flight; later calls do nothing.
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
        """End the flight with an answer, which the waiting calls receive. If `is_kept` is True,
        also store the answer for later calls. Do nothing if the flight has already ended.

        `data` is the answer as JSON, and `at` the time at which it was made. If `ttl_seconds` is
        None, the answer expires as the settings say. `warnings`, `redacted` and `metacognition` are
        copied from the running call's answer, with the same meaning as there.
        """
        if not self.over.is_set():
            expires = self._cache.expiry(ttl_seconds)
            self.answer = CachedAnswer(data, warnings, at, expires, redacted, metacognition)
            self._cache.end(self, self._key, is_kept=is_kept)

    def close(self) -> None:
        """End the flight without an answer. One of the waiting calls then runs instead. Do nothing
        if the flight has already ended.
        """
        if not self.over.is_set():
            self._cache.end(self, self._key, is_kept=False)


class ResultCache:
    """The cached answers of one engine, and its flights (the running calls whose answers identical
    calls wait for). `monotonic` returns the time of the monotonic clock in seconds.
    """

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
        """Return the stored answer for `key`. Return None if there is none, or if it has
        expired.
        """
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
        """Return the answer for `key`. If there is none, return a new flight (a running call, whose
        answer identical calls wait for). The caller must then run the call and end the flight.

        If an identical call is running, first wait for its answer, for at most `wait_s()` seconds.

        Raises:
            TimeoutError: within this time, the identical call neither answered nor ended.
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
        """Return the current size of the cache, and its hits, misses and evictions since the start
        of the engine.
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

        The answer of a call that is running now goes only to those calls that already wait for it.
        """
        cleared = len(self._entries)
        self._entries.clear()
        self._flights.clear()
        self._size_bytes = 0
        return ClearedCache(cleared=cleared)

    def expiry(self, ttl_seconds: int | None) -> float:
        """Return the time at which a new answer expires, in seconds of the monotonic clock. If
        `ttl_seconds` is None, the answer expires as the settings say.
        """
        ttl_s = self._settings.ttl_seconds if ttl_seconds is None else ttl_seconds
        return self._monotonic() + ttl_s

    def end(self, flight: Flight, key: str, *, is_kept: bool) -> None:
        """End `flight`, and wake the calls that wait for it. If `is_kept` is True, also store its
        answer under `key`.

        Only `Flight` calls this method.
        """
        if self._flights.get(key) is flight:
            del self._flights[key]
            if is_kept and flight.answer is not None:
                self._keep(key, flight.answer)
        flight.over.set()

    async def _of_others(self, key: str) -> CachedAnswer | None:
        """Wait for the identical calls that are running. Return the first answer, or None if all of
        these calls end without an answer.
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
