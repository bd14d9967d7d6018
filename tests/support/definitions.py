"""Definitions and functions that many tests declare."""

from __future__ import annotations

from typing import Any

from fumehood import ToolDefinition
from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import CallFacts, Decision, Verdict
from fumehood.registry.index import RegisteredTool, Source, ToolIndex

OWNER = Principal("uid:1000", frozenset({Scope.CALL}))


class NoRules:
    """A policy without any rule."""

    def decide(self, facts: CallFacts) -> Decision:
        """What the defaults say."""
        return by_default(facts.tool)


def by_default(tool: ToolDefinition) -> Decision:
    """What a policy without rules says of a tool."""
    if tool.dangerous:
        return Decision(Verdict.ASK, "default: dangerous tools wait for a human")
    return Decision(Verdict.ALLOW, "default: harmless tools are allowed")


def never() -> bool:
    """No budget has too little left."""
    return False


def expression_document(**fields: Any) -> JsonObject:
    """A sound document of a tool with the executor `expression`."""
    return {
        "name": "sums",
        "description": "Add numbers.",
        "executor": "expression",
        "parameters": {"properties": {"expression": {"type": "string"}}},
        **fields,
    }


def rest_document(**fields: Any) -> JsonObject:
    """A sound document of a REST tool."""
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
    """The tool in an index of its own."""
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
