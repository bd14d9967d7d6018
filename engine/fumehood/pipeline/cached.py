"""Cached: answer a call of a cacheable tool with the result of an equal one (mission P4).

A part of the stage `claim`, after authorization. Takes a `PermittedCall` that the policy allows
without asking; `cache/store` keeps the answers. A call with an idempotency key, in a session, or
with `debug` neither reads nor writes the cache. Invariants: two calls share an answer only if
principal, agent, tool, definition and effective arguments are the same; the answer of a run that
failed, was cancelled or hit a limit is not stored, nor one with a link, which could expire first.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from pydantic_core import from_json

from fumehood.approvals.preview import definition_digest
from fumehood.cache.store import CachedAnswer, Flight
from fumehood.core.call import replaced
from fumehood.core.envelope import (
    CacheReport,
    Envelope,
    Metadata,
    Performance,
    Resources,
    UsageReport,
)
from fumehood.core.errors import Timeout
from fumehood.core.json_types import JsonObject
from fumehood.observe.clock import timestamp
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.plan import make_plan
from fumehood.policy.model import Verdict
from fumehood.protocol import strict_json

_REPORT = CacheReport(hit=True, cached_at=None, ttl_remaining=None)
"""The template of a hit's cache report."""
_HIT = Metadata(
    tool_name=None,
    tool_version=None,
    call_id=None,
    trace_id="",
    timestamp="",
    execution_time_ms=0.0,
    performance=Performance(total_ms=0.0, validation_ms=None),
    sandbox=None,
    resources=Resources(),
    usage=UsageReport(),
    warnings=(),
    redacted=0,
    metacognition=None,
    cache=_REPORT,
)
_ANSWER = Envelope(success=True, status="success", data={}, error=None, metadata=_HIT)
"""The template of a hit's answer, without the fields that differ between hits."""

_nothing_used = lru_cache(maxsize=8)(lambda currency: UsageReport(currency=currency))

_BLOB = b"/v1/blobs/"
_NOT_KEPT = b'"not_kept":'
"""Texts that appear in an answer if some content is only linked, or was not stored. Such an answer
is not cached."""


async def answer_from_cache(
    permitted: PermittedCall, call: CallContext, services: PipelineServices
) -> Envelope | None:
    """Return the answer of an equal call, or None if this call must run itself.

    Waits while an equal call is running.

    Raises:
        Timeout: the equal call took longer than this call's own time limit.
        EngineError: this call could not run, so it does not wait either.
    """
    key = _key_of(permitted, services)
    if key is None:
        return None

    found = services.cache.find(key) or await _take(key, permitted, services)
    if isinstance(found, Flight):
        call.flight = found
        return None
    call.handle.close()
    return _hit(found, permitted, call, services)


async def _take(
    key: str, permitted: PermittedCall, services: PipelineServices
) -> CachedAnswer | Flight:
    def limit_s() -> float:
        return make_plan(permitted, services.walls, services.sessions).limits.wall_s

    try:
        return await services.cache.take(key, limit_s)
    except TimeoutError:
        raise Timeout(
            "An equal call is still running, and the time limit of this one is over. Nothing was "
            "run for it. Repeat it later, or with a higher timeout_seconds.",
            retryable=True,
        ) from None


def land(call: CallContext, flight: Flight, envelope: Envelope) -> None:
    """End the flight of a call that has ended. Equal calls get its answer if it can be shared."""
    validated, data = call.validated, envelope.data
    is_partial = call.handle.partial is not None or "limits_hit" in data
    is_anothers = envelope.metadata.fallback is not None
    if envelope.error is not None or is_partial or is_anothers or validated is None:
        flight.close()
        return
    text = strict_json.dumps(data)
    own = len(validated.warnings) + (len(call.plan.warnings) if call.plan is not None else 0)
    flight.land(
        text,
        envelope.metadata.warnings[own:],
        at=envelope.metadata.timestamp,
        ttl_seconds=validated.tool.definition.cache_ttl,
        is_kept=_BLOB not in text and _NOT_KEPT not in text,
        redacted=envelope.metadata.redacted,
        metacognition=envelope.metadata.metacognition,
    )


def _key_of(permitted: PermittedCall, services: PipelineServices) -> str | None:
    """Return the cache key of a call, or None if the call is not cached."""
    tool, options = permitted.tool, permitted.request.options
    if (
        not options.enable_cache
        or options.debug
        or options.session_id is not None
        or options.packages is not None
        or options.receipt
        or options.replay is not None
        or permitted.validated.resolved.network
        or permitted.decision.verdict is not Verdict.ALLOW
    ):
        return None
    chosen = tool.definition.cache_key_params
    return services.cache.keys.key(
        tool,
        definition_digest,
        permitted.arguments if chosen is None else _deciding_arguments(permitted, chosen),
        permitted.principal.id,
        options,
    )


def _deciding_arguments(permitted: PermittedCall, chosen: Iterable[str]) -> JsonObject:
    """Return the chosen arguments and those that the agent's configuration fixes."""
    binding = permitted.validated.binding
    names = {*chosen, *(binding.fixed if binding is not None else ())}
    return {name: value for name, value in permitted.arguments.items() if name in names}


def _hit(
    found: CachedAnswer, permitted: PermittedCall, call: CallContext, services: PipelineServices
) -> Envelope:
    tool, request, trace = permitted.tool.definition, call.request, call.trace
    total_ms = round(trace.total_ms, 3)
    metadata = replaced(
        _HIT,
        tool_name=tool.name,
        tool_version=tool.version,
        call_id=request.call_id,
        trace_id=request.trace_id,
        timestamp=timestamp(services.clock.now()),
        execution_time_ms=total_ms,
        performance=replaced(
            _HIT.performance, total_ms=total_ms, validation_ms=trace.stage_ms("validate")
        ),
        usage=_nothing_used(services.prices.currency),
        warnings=permitted.validated.warnings + found.warnings,
        redacted=found.redacted,
        metacognition=found.metacognition,
        cache=replaced(
            _REPORT,
            cached_at=found.cached_at,
            ttl_remaining=round(max(0.0, found.expires - services.clock.monotonic()), 3),
        ),
    )
    return replaced(_ANSWER, data=from_json(found.data), metadata=metadata)
