"""Calls with idempotency keys, run by a small driver in place of the call pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.errors import EngineError
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import Claim, Keys, Replay, Waiting
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.storage.idempotency import KeyedCall

from .answers import envelope_of, failure
from .definitions import OWNER, by_default, function_definition, registered, request

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEYED = function_definition(
    {"idempotency_key": {"type": ["string", "integer", "null"]}, "text": {"type": "string"}}
)
"""A tool that receives the key as an argument."""


def principal(name: str) -> Principal:
    """A principal with the scope `call`."""
    return Principal(name, frozenset({Scope.CALL}))


def permitted(
    arguments: JsonObject | None = None,
    *,
    tool: ToolDefinition | None = None,
    by: Principal = OWNER,
    effective: JsonObject | None = None,
    **options: Any,
) -> PermittedCall:
    """An authorized call; `effective` if its arguments differ from the given ones."""
    definition = tool or function_definition()
    resolved = ResolvedCall(
        request(definition.name, arguments, by, **options), registered(definition), ()
    )
    given = effective if effective is not None else resolved.request.arguments
    return PermittedCall(ValidatedCall(resolved, given, ()), by, by_default(definition))


def keyed(call_id: str = "call_1", **fields: Any) -> KeyedCall:
    """A call with the key `k` of `uid:1`."""
    values: dict[str, Any] = {
        "principal_id": "uid:1", "key": "k", "fingerprint": "f", "may_repeat": False, **fields,
    }  # fmt: skip
    return KeyedCall(call_id=call_id, **values)


def answer(
    call_id: str = "call_1", data: JsonObject | None = None, error: ErrorInfo | None = None
) -> Envelope:
    """The envelope of a call that has ended."""
    return envelope_of(data, error, call_id=call_id, tool_name="act", tool_version="1.0.0")


UNKNOWN_ENDING = answer(error=failure("INTERNAL_ERROR"))
"""The ending of a call that failed in the engine or was cancelled."""

Act = Callable[[], Awaitable[Envelope]]


@dataclass
class Driver:
    """Runs a call from its claim to its answer; `acted` records the calls that ran."""

    keys: Keys
    acted: list[str] = field(default_factory=list)

    async def call(
        self, call: PermittedCall, call_id: str, act: Act | None = None, now: datetime = NOW
    ) -> Envelope | Waiting | str:
        """The answer, the approval it waits for, or the refusal's code."""
        try:
            found = await self.keys.claim(call, call_id, now)
        except EngineError as refusal:
            return refusal.code
        if isinstance(found, Replay):
            return found.envelope
        if isinstance(found, Waiting):
            return found
        self.acted.append(call_id)
        try:
            envelope = await act() if act is not None else answer(call_id, {"by": call_id})
        except BaseException:
            if isinstance(found, Claim):
                await found.settle(UNKNOWN_ENDING, acted=True)
            raise
        return await found.settle(envelope, acted=True) if found is not None else envelope
