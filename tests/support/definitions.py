"""Tool definitions and functions shared by many tests."""

from __future__ import annotations

from typing import Any

from fumehood import ToolDefinition
from fumehood.call_options import CallOptions
from fumehood.core.call import CallRequest
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Decision, Verdict
from fumehood.registry.index import RegisteredTool, Source, ToolIndex

OWNER = Principal("uid:1000", frozenset({Scope.CALL}))


def by_default(tool: ToolDefinition) -> Decision:
    """The decision of a policy without rules."""
    if tool.dangerous:
        return Decision(Verdict.ASK, "default: dangerous tools wait for a human")
    return Decision(Verdict.ALLOW, "default: harmless tools are allowed")


def never() -> bool:
    """A budget check that never refuses."""
    return False


def expression_document(**fields: Any) -> JsonObject:
    """A valid tool document with the executor `expression`."""
    return {
        "name": "sums",
        "description": "Add numbers.",
        "executor": "expression",
        "parameters": {"properties": {"expression": {"type": "string"}}},
        **fields,
    }


def rest_document(**fields: Any) -> JsonObject:
    """A valid REST tool document."""
    return {
        "name": "weather",
        "type": "REST",
        "description": "Read the weather of a city.",
        "method": "GET",
        "endpoint": "https://weather.example/v1/now",
        "parameters": {"properties": {"city": {"type": "string"}}},
        **fields,
    }


def function_definition(
    properties: JsonObject | None = None, *, schema: JsonObject | None = None, **fields: Any
) -> ToolDefinition:
    """A definition with the executor `function`, to be registered with a function."""
    parameters = {"properties": properties or {}, **(schema or {})}
    return ToolDefinition.model_validate(
        {
            "name": "act",
            "description": "Act.",
            "sandboxed": False,
            "parameters": parameters,
            **fields,
        }
    )


async def answer_nothing(arguments: JsonObject) -> Any:
    """A host function that does nothing."""
    return {}


def registered(definition: ToolDefinition, **more: Any) -> RegisteredTool:
    """The tool as registered in a new index."""
    function = answer_nothing if definition.executor == "function" else None
    return ToolIndex().register(definition, Source.PROGRAM, **{"function": function, **more})


def request(
    tool: str = "act",
    arguments: JsonObject | None = None,
    principal: Principal | None = OWNER,
    **options: Any,
) -> CallRequest:
    """One call of the owner."""
    return CallRequest(
        tool, arguments or {}, CallOptions(**options), principal, "call_test", "trace_test"
    )
