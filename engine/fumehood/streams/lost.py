"""The answer to a call whose engine ended before the call was answered.

Host side, for recorded calls, because recordings outlive the engine's process. The answer is
determined from the stored state: the call's approval, the answer stored for its idempotency key,
and the call log. If these have no answer, the error depends on whether the call's tool may be
repeated. This module is used after calls that wait for approval have been recovered.
"""

from __future__ import annotations

from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    EngineError,
    OutcomeUnknown,
    ResourceNotFound,
    SandboxUnavailable,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.pipeline.context import PipelineServices, context_of
from fumehood.pipeline.record import record_ending
from fumehood.pipeline.result import build_envelope
from fumehood.protocol.messages import decode_envelope
from fumehood.storage.errors import StoreError


async def answer_of_lost(
    call_id: str, principal_id: str, tool: str, trace_id: str, services: PipelineServices
) -> Envelope:
    """Return the answer to a call that was running when its engine ended. If no answer was stored,
    return an error. `services` gives access to the stored state.
    """
    # This principal only names the caller in the log, so it has no scopes.
    principal = Principal(principal_id, frozenset(), frozenset())
    request = CallRequest(tool, {}, CallOptions(), principal, call_id, trace_id)
    try:
        found = await services.asker.ending_of(call_id, principal_id)
        found = found or await _of_key(call_id, principal_id, services)
        code = await _logged(call_id, principal_id, services)
    except (StoreError, ValueError):  # ValueError: another version of the engine wrote the answer
        found, code = None, None
    if isinstance(found, Envelope):
        return found
    error = found if found is not None else _lost(tool, code, services)
    context = context_of(request, services)
    envelope = await build_envelope(context, error, services)
    if found is None and code is None:  # otherwise, the call's end is or will be recorded elsewhere
        record_ending(context, envelope, services)
    return envelope


async def _of_key(call_id: str, principal_id: str, services: PipelineServices) -> Envelope | None:
    """Return the answer that was stored for the call's idempotency key, or None."""
    answer = await services.keys.answer_of(principal_id, call_id)
    return None if answer is None else decode_envelope(answer.encode())


async def _logged(call_id: str, principal_id: str, services: PipelineServices) -> str | None:
    """Return the result code of the call in the call log, or None. The call log does not contain
    the answer.
    """
    try:
        return (await services.stores.calls.get(principal_id, call_id)).code
    except ResourceNotFound:
        return None


def _lost(tool: str, code: str | None, services: PipelineServices) -> EngineError:
    if code is not None:
        return OutcomeUnknown(
            f"The call ended with {code}, but the engine ended before its answer was kept. Do not "
            "retry; a human must check what it did.",
            details={"logged_code": code},
        )
    if _may_repeat(tool, services):
        return SandboxUnavailable(
            "The engine ended while the call ran. Its tool may be repeated: make the call again."
        )
    return OutcomeUnknown(
        "The engine ended while the call ran. It may have taken effect. Do not retry; a human must "
        "check whether it did."
    )


def _may_repeat(tool: str, services: PipelineServices) -> bool:
    """Whether repeating a call of the tool is harmless."""
    try:
        definition = services.registry.get(tool).definition
    except ToolNotFound:
        return False
    return definition.idempotent or definition.read_only
