"""The tools that a program may call, in the form in which the guest receives them.

Host side. A program cannot call tools that run programs or work on a session's files.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from dataclasses import replace

from fumehood.core.call import CallRequest
from fumehood.core.errors import EngineError, InvalidParams, ToolDisabled
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.identity.agents import seen_by_agent
from fumehood.pipeline.context import PipelineServices
from fumehood.pipeline.permit import require_for_program
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.validate import MISFIT

_TAKEN = frozenset({"ToolError", "ABSENT"})
"""Names in the guest's module `tools` that are not tools."""


def tools_of(
    request: CallRequest,
    asked: Sequence[str],
    services: PipelineServices,
    *,
    are_fixed: bool = False,
) -> list[JsonObject]:
    """Return the tools that the program of a call may call, in the form in which the guest receives
    them. `asked` is the call's argument `tools`, a list of tool names.

    `are_fixed` is True if the agent's configuration sets the argument `tools`.

    Raises:
        InvalidParams: the program may not call one of the tools, or two tools would get the same
            function name.
        ToolDisabled: `are_fixed` is True, and the program may not call one of the tools.
    """
    tools: dict[str, JsonObject] = {}
    for index, reference in enumerate(asked):
        path = f"tools.{index}"
        try:
            definition = _visible(request, reference, services)
        except EngineError as refusal:
            if are_fixed:
                raise ToolDisabled(MISFIT) from None
            raise InvalidParams(
                f"The program cannot have the tool {reference[:80]!r}: {refusal.message}",
                fields=[path],
            ) from None
        function = _function_name(definition.name)
        if function in tools:
            raise InvalidParams(f"{path} is a second tool {function!r}.", fields=[path])
        tools[function] = {
            "name": reference,
            "function": function,
            "description": definition.description,
            "parameters": definition.parameters,
        }
    return list(tools.values())


def _visible(request: CallRequest, reference: str, services: PipelineServices) -> ToolDefinition:
    """Return the definition of the tool `reference`. If the call has an agent, the definition is
    returned as this agent sees it.

    `request` is the call, whose caller and agent must both be allowed to use the tool.

    Raises:
        EngineError: the caller or the agent may not use the tool, or programs may not call it.
    """
    found = resolve(
        replace(request, tool=reference, arguments={}),
        services.registry,
        services.identities.agents,
        services.clock.now,
    )
    tool = found.tool.definition
    require_for_program(tool)
    return tool if found.binding is None else seen_by_agent(tool, found.binding)


def _function_name(tool: str) -> str:
    name = tool.replace("-", "_")
    is_taken = keyword.iskeyword(name) or name in _TAKEN or name.startswith("__")
    return f"{name}_" if is_taken else name
