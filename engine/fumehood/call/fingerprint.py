"""Fingerprints: whether two calls with one idempotency key are the same call.

Used by `claim`. A fingerprint is a SHA-256 over RFC 8785 canonical JSON of everything that
decides what a call does, and of nothing that only decides how it is answered. Invariant: calls
with different arguments have different canonical forms.

RFC 8785 knows no integers beyond ±(2^53 − 1). One of those is written `{"$integer": "hex digits"}`,
and an object that looks like that is wrapped, `{"$object": …}`, so that no two values share a
form. Numbers that JSON takes for equal (1 and 1.0) are equal.
"""

from __future__ import annotations

import hashlib
from typing import Any

import rfc8785

from fumehood.call.authorise import PermittedCall
from fumehood.model.errors import InvalidParams
from fumehood.model.idempotency import PARAMETER
from fumehood.model.json_types import JsonObject

DECIDING_OPTIONS = ("timeout_seconds", "memory_limit_mb", "isolation")
"""Options that change what happens; `agent_id` and `session_id` have names of their own."""

SHOWING_OPTIONS = frozenset(
    {
        "enable_cache", "enable_streaming", "enable_retry", "debug", "max_length",
        "return_summary", "wait_for_approval", "trace_id", "cancel_on_disconnect",
    }
)  # fmt: skip
"""Options that change how the caller is answered, or how hard the engine tries."""

MAX_SAFE_INTEGER = 2**53 - 1
_INTEGER, _OBJECT = "$integer", "$object"


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


def canonical(value: Any) -> bytes:
    """The canonical form of a JSON value.

    Raises:
        ValueError: a value that JSON cannot hold.
    """
    return rfc8785.dumps(_plain(value))


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
        return hashlib.sha256(canonical(value)).hexdigest()
    except ValueError:
        raise InvalidParams(
            "The arguments hold what JSON has no canonical form for, so an idempotency key cannot "
            "be used. Send plain JSON, or leave the key out.",
            fields=["options.idempotency_key"],
        ) from None


def _plain(value: Any) -> Any:
    """The value in what RFC 8785 knows."""
    if isinstance(value, dict):
        plain = {name: _plain(item) for name, item in value.items()}
        return {_OBJECT: plain} if value.keys() in ({_INTEGER}, {_OBJECT}) else plain
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        return {_INTEGER: format(value, "x")}
    return value
