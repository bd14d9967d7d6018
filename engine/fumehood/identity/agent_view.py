"""A tool as one agent sees it: without the arguments that its binding fixes. Pure.

What is fixed is neither named nor described; what has a default of the agent's own need not
be given. The definition itself, by which calls are checked, stays as it is.
"""

from __future__ import annotations

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.identity.agent import Binding


def seen_by_agent(tool: ToolDefinition, binding: Binding) -> ToolDefinition:
    """The definition with the parameters that are the agent's to give."""
    if not binding.fixed and not binding.defaults:
        return tool
    parameters = dict(tool.parameters)
    properties = parameters.get("properties", {})
    parameters["properties"] = {
        name: _with_default(schema, name, binding)
        for name, schema in properties.items()
        if name not in binding.fixed
    }
    if "required" in parameters:
        given = binding.fixed.keys() | binding.defaults.keys()
        parameters["required"] = [name for name in parameters["required"] if name not in given]
    examples = tuple(
        {name: value for name, value in example.items() if name not in binding.fixed}
        for example in tool.input_examples
    )
    return tool.model_copy(update={"parameters": parameters, "input_examples": examples})


def _with_default(schema: object, name: str, binding: Binding) -> object:
    if name not in binding.defaults or not isinstance(schema, dict):
        return schema
    shown: JsonObject = {**schema, "default": binding.defaults[name]}
    return shown
