"""The request of a call. It loads no models: a command line sends it and is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fumehood.client.api_request import ApiRequest, address, encode
from fumehood.core.json_types import JsonObject

T = TypeVar("T")

LONGEST_CALL_S = 600.0
"""How long a call may run that says no time of its own: the longest that a wall allows."""

LONGEST_WAIT_S = 3600.0
"""How long a call may wait for a human that says no time of its own: the longest that an engine
can be configured for."""


def call_read_by(
    read: Callable[[bytes], T], tool: str, arguments: JsonObject | None, options: JsonObject
) -> ApiRequest[T]:
    """One call. Raises ValueError where it is not JSON, or the name can be none."""
    body = {"arguments": arguments if arguments is not None else {}, "options": options}
    path = address("tools", tool, "call")
    return ApiRequest("POST", path, read, encode(body), _work_s(options))


def _work_s(options: JsonObject) -> float:
    """How long the call may wait for a human and run."""
    wait: Any = options.get("wait_for_approval")
    waits_s = LONGEST_WAIT_S if wait is True else _seconds(wait) or 0.0
    return waits_s + (_seconds(options.get("timeout_seconds")) or LONGEST_CALL_S)


def _seconds(asked: Any) -> float | None:
    """What is no time is the engine's to refuse, at once."""
    if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
        return float(asked)
    return None
