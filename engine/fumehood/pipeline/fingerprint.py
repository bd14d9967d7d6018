"""Fingerprints: whether two calls with one idempotency key are the same call.

Used by `claim`. A fingerprint is the hash of the canonical text (`protocol/canonical`) of all that
decides what a call does, and of nothing that only decides how it is answered. Invariant: calls with
different arguments have different fingerprints; numbers that JSON takes for equal (1 and 1.0) are
equal.
"""

from __future__ import annotations

from fumehood.core.errors import InvalidParams
from fumehood.core.idempotency import PARAMETER
from fumehood.core.json_types import JsonObject
from fumehood.pipeline.authorize import PermittedCall
from fumehood.protocol.canonical import digest_of

DECIDING_OPTIONS = ("timeout_seconds", "memory_limit_mb", "isolation")
"""Options that change what happens; `agent_id` and `session_id` have names of their own."""

SHOWING_OPTIONS = frozenset(
    {
        "enable_cache", "enable_streaming", "enable_retry", "debug", "max_length",
        "return_summary", "wait_for_approval", "trace_id", "cancel_on_disconnect",
    }
)  # fmt: skip
"""Options that change how the caller is answered, or how hard the engine tries."""


def fingerprint(permitted: PermittedCall) -> str:
    """What makes the call this call, in 64 hex digits.

    Raises:
        InvalidParams: the arguments have no canonical form.
    """
    options = permitted.request.options
    return _digest(
        _action(permitted)
        | {"options": {name: getattr(options, name) for name in DECIDING_OPTIONS}}
    )


def key_made_of(permitted: PermittedCall) -> str:
    """A key from the call itself: the same action of the same caller has the same one.

    Raises:
        InvalidParams: the arguments have no canonical form.
    """
    return f"auto:{_digest(_action(permitted))}"


def _action(permitted: PermittedCall) -> JsonObject:
    """The tool, its effective arguments but the key, and who calls it where."""
    tool, options = permitted.tool.definition, permitted.request.options
    return {
        "tool": tool.name,
        "version": tool.version,
        "arguments": _without_key(permitted),
        "principal": permitted.principal.id,
        "agent": options.agent_id,
        "session": options.session_id,
    }


def _without_key(permitted: PermittedCall) -> JsonObject:
    arguments = permitted.validated.arguments
    if takes_key(permitted):
        return {name: value for name, value in arguments.items() if name != PARAMETER}
    return arguments


def takes_key(permitted: PermittedCall) -> bool:
    """Whether the tool has a parameter of its own for the key."""
    return PARAMETER in permitted.tool.definition.parameters.get("properties", {})


def _digest(value: JsonObject) -> str:
    try:
        return digest_of(value)
    except ValueError:
        raise InvalidParams(
            "The arguments hold what JSON has no canonical form for, so an idempotency key cannot "
            "be used. Send plain JSON, or leave the key out.",
            fields=["options.idempotency_key"],
        ) from None
