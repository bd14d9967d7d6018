"""The cache's gate in the pipeline: a call of a cacheable tool can get the result of an identical
call.

A call does not use the cache if it is in a session, has the option `debug`, or has options that
change what its program can reach. Invariants:

* Two calls share an answer only if they have the same principal, agent, tool, definition and
  effective arguments.
* An answer is not shared if its run failed, was cancelled or hit a limit.
* An answer that contains a link is not stored, because the link could expire before the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fumehood.approvals.preview import definition_digest
from fumehood.cache.options import ENABLE_CACHE
from fumehood.cache.store import CachedAnswer, Flight, ResultCache
from fumehood.call_options import chosen_options
from fumehood.core.call import replaced
from fumehood.core.envelope import CacheReport
from fumehood.core.errors import Timeout
from fumehood.core.json_types import JsonObject
from fumehood.observe.clock import Clock
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.gate import Ended, Gate, Hold, KnownAnswer
from fumehood.protocol import strict_json

_HIT = CacheReport(hit=True, cached_at=None, ttl_remaining=None)
"""Template for the report of a call that the cache answers."""

_MISS = CacheReport(hit=False)

_BLOB = b"/v1/blobs/"
_NOT_KEPT = b'"not_kept":'
"""If an answer contains one of these two texts, some of its content is only linked, or was not
stored. Such an answer is not cached.
"""


class CacheGate(Gate):
    """The gate that answers a call with the result of an identical call."""

    def __init__(self, answers: ResultCache, clock: Clock) -> None:
        self._answers = answers
        self._clock = clock

    async def answer(
        self, permitted: PermittedCall, limit_s: Callable[[], float]
    ) -> KnownAnswer | Hold | None:
        """Return the result of an identical call, or a hold if there is none. Return None if the
        call does not use the cache.

        The hold shares this call's result with identical calls. If an identical call is running,
        this method waits for its result. `limit_s` returns the maximum number of seconds to wait.

        Raises:
            Timeout: the identical call did not end within this call's own time limit.
            EngineError: `limit_s` found that this call cannot run.
        """
        key = self._key(permitted)
        if key is None:
            return None
        found = self._answers.find(key) or await self._take(key, limit_s)
        return _Flying(found, permitted) if isinstance(found, Flight) else self._known(found)

    async def _take(self, key: str, limit_s: Callable[[], float]) -> CachedAnswer | Flight:
        try:
            return await self._answers.take(key, limit_s)
        except TimeoutError:
            raise Timeout(
                "An equal call is still running, and the time limit of this one is over. Nothing "
                "was run for it. Repeat it later, or with a higher timeout_seconds.",
                retryable=True,
            ) from None

    def _known(self, found: CachedAnswer) -> KnownAnswer:
        ttl_s = round(max(0.0, found.expires - self._clock.monotonic()), 3)
        report = replaced(_HIT, cached_at=found.cached_at, ttl_remaining=ttl_s)
        return KnownAnswer(
            found.data, found.warnings, {"cache": report}, found.redacted, found.metacognition
        )

    def _key(self, permitted: PermittedCall) -> str | None:
        """Return the key under which the cache stores the call's answer, or None if the call does
        not use the cache.
        """
        tool, options = permitted.tool, permitted.request.options
        if (
            not tool.definition.cacheable
            or not ENABLE_CACHE.of(options)
            or options.debug
            or options.session_id is not None
            or any(option.decides for option in chosen_options(options))
            or permitted.validated.resolved.network
        ):
            return None
        chosen = tool.definition.cache_key_params
        return self._answers.keys.key(
            tool,
            definition_digest,
            permitted.arguments if chosen is None else _deciding_arguments(permitted, chosen),
            permitted.principal.id,
            options,
        )


def _deciding_arguments(permitted: PermittedCall, chosen: Iterable[str]) -> JsonObject:
    """Return those arguments whose names are in `chosen`, and those that the configuration of the
    agent fixes.
    """
    binding = permitted.validated.binding
    names = {*chosen, *(binding.fixed if binding is not None else ())}
    return {name: value for name, value in permitted.arguments.items() if name in names}


class _Flying(Hold):
    """The hold of one running call whose answer goes to the cache. Identical calls wait until this
    hold ends the call's flight.
    """

    metadata: Mapping[str, Any] = MappingProxyType({"cache": _MISS})

    def __init__(self, flight: Flight, permitted: PermittedCall) -> None:
        self._flight = flight
        self._ttl_seconds = permitted.tool.definition.cache_ttl

    def settle(self, ended: Ended) -> None:
        """Share the answer of the ended call with identical calls, unless the call failed, was
        cancelled or hit a limit.
        """
        if not ended.is_whole:
            return
        metadata, text = ended.envelope.metadata, strict_json.dumps(ended.envelope.data)
        self._flight.land(
            text,
            ended.warnings,
            at=metadata.timestamp,
            ttl_seconds=self._ttl_seconds,
            is_kept=_BLOB not in text and _NOT_KEPT not in text,
            redacted=metadata.redacted,
            metacognition=metadata.metacognition,
        )

    def close(self) -> None:
        """Let one of the waiting identical calls run instead, if this call's answer has not been
        shared.
        """
        self._flight.close()
