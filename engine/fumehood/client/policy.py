"""The requests about the policy, each as a function that makes one."""

from __future__ import annotations

from fumehood.client.ask import ApiRequest, address, data_of, encode
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Explanation, PolicyStatus


def show_policy() -> ApiRequest[PolicyStatus]:
    """The rules that decide now."""
    return ApiRequest("GET", address("policy"), data_of(PolicyStatus))


def explain(
    tool: str,
    arguments: JsonObject | None,
    *,
    principal_id: str | None,
    agent_id: str | None,
    session_id: str | None,
) -> ApiRequest[Explanation]:
    """What the rules say of a call."""
    given: JsonObject = {
        "tool": tool,
        "arguments": arguments or {},
        "principal_id": principal_id,
        "agent_id": agent_id,
        "session_id": session_id,
    }
    body = {name: value for name, value in given.items() if value is not None}
    return ApiRequest("POST", address("policy", "explain"), data_of(Explanation), encode(body))


def reload_policy() -> ApiRequest[PolicyStatus]:
    """Read the file anew."""
    return ApiRequest("POST", address("policy", "reload"), data_of(PolicyStatus))
