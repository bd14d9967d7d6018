"""The result cache of one engine."""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.cache.gate import CacheGate
from fumehood.cache.settings import CacheSettings
from fumehood.cache.store import ResultCache
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.figures import Figure


class Cache(EnginePart):
    """The part that keeps the `answers` of cacheable tools, and answers identical calls from
    them.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        settings = kernel.config.of("cache", CacheSettings)
        assert settings is not None
        self.answers = ResultCache(settings, kernel.clock.monotonic)

    def gates(self) -> Iterator[CacheGate]:
        """Yield the cache's gate, which answers identical calls."""
        yield CacheGate(self.answers, self.kernel.clock)

    def figures(self) -> Iterator[Figure]:
        """Yield the cache's metrics: hits, misses and size."""
        status = self.answers.status()
        yield Figure("cache_hits", "Calls answered by the result cache.", status.hits,
                     kind="counter")  # fmt: skip
        yield Figure("cache_misses", "Calls that it did not answer.", status.misses, kind="counter")
        yield Figure("cache_bytes", "Size of the results in the cache.", status.size_bytes)
