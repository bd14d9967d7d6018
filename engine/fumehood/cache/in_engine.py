"""The result cache as a part of one engine."""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.cache.gate import CacheGate
from fumehood.cache.settings import CacheSettings
from fumehood.cache.store import ResultCache
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.figures import Figure


class Cache(EnginePart):
    """Keeps the answers of cacheable tools in the attribute `answers`, and answers identical calls
    with them.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        settings = kernel.config.of("cache", CacheSettings)
        assert settings is not None
        self.answers = ResultCache(settings, kernel.clock.monotonic)

    def gates(self) -> Iterator[CacheGate]:
        """Yield the cache's gate, which answers calls with the results of identical calls."""
        yield CacheGate(self.answers, self.kernel.clock)

    def figures(self) -> Iterator[Figure]:
        """Yield the cache's metrics: its hits, its misses and its size."""
        status = self.answers.status()
        yield Figure("cache_hits", "Calls answered by the result cache.", status.hits,
                     kind="counter")  # fmt: skip
        yield Figure("cache_misses", "Calls that it did not answer.", status.misses, kind="counter")
        yield Figure("cache_bytes", "Size of the results in the cache.", status.size_bytes)
