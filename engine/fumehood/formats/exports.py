"""Exports: tools in a provider's format, or in that of the Model Context Protocol.

Each tool is converted again only if it changes. The registry replaces a definition that changes, so
identity shows whether a tool is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.formats.base import Format
from fumehood.formats.model import ExportedTools, FormatName, Loss
from fumehood.formats.table import CHAT_FORMATS
from fumehood.registry.json_schema import CompiledSchema, TooCostly


class Mcp(Format):
    """The Model Context Protocol. Exports tools only, because calls arrive through `fumehood
    mcp`.
    """

    name = "mcp"

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool. There are never losses."""
        return tool_to_mcp(tool), []


FORMATS: Mapping[str, Format] = {**CHAT_FORMATS, "mcp": Mcp()}

_Kept = tuple[ToolDefinition, JsonObject, list[Loss]]


class Exports:
    """Cached exports: each tool's converted form, by format and tool name."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _Kept]] = {}

    def of_all(self, name: FormatName, tools: Iterable[ToolDefinition]) -> ExportedTools:
        """Export all given tools, which are the whole registry. Their converted forms replace the
        cache.
        """
        found = [self._one(name, tool) for tool in tools]
        self._kept[name] = {kept[0].name: kept for kept in found}
        return _exported(name, found)

    def of_some(self, name: FormatName, tools: Iterable[ToolDefinition]) -> ExportedTools:
        """Export some tools, or an agent's own view of them. Does not change the cache."""
        return _exported(name, [self._one(name, tool) for tool in tools])

    def _one(self, name: FormatName, tool: ToolDefinition) -> _Kept:
        kept = self._kept.get(name, {}).get(tool.name)
        return kept if kept is not None and kept[0] is tool else _converted(name, tool)


def is_offered(tool: ToolDefinition, today: date) -> bool:
    """Whether a tool can be called today."""
    return tool.is_active and (tool.sunset_date is None or tool.sunset_date >= today)


def _exported(name: FormatName, found: list[_Kept]) -> ExportedTools:
    tools = FORMATS[name].tools([made for _, made, _ in found])
    losses = tuple(loss for _, _, losses in found for loss in losses)
    return ExportedTools.model_construct(format=name, tools=tools, losses=losses)


def _converted(name: FormatName, tool: ToolDefinition) -> _Kept:
    """Convert a tool, without examples that its own schema refuses: one of them would make the
    provider refuse the whole request.
    """
    shown = tool.for_models()
    if not tool.input_examples or name != "anthropic":
        return tool, *FORMATS[name].tool(shown)
    schema = CompiledSchema(shown.parameters)
    sound = tuple(each for each in tool.input_examples if _fits(schema, each))
    made, losses = FORMATS[name].tool(shown.model_copy(update={"input_examples": sound}))
    if len(sound) < len(tool.input_examples):
        losses = [
            *losses,
            Loss(
                tool=tool.name, where="input_examples",
                what="an example does not fit the parameters and is left out",
                change="correct the example",
            ),
        ]  # fmt: skip
    return tool, made, losses


def _fits(schema: CompiledSchema, example: JsonObject) -> bool:
    try:
        return not schema.violations(example)
    except TooCostly:
        return False


# -- the Model Context Protocol -------------------------------------------------------------

_KEPT = re.compile(
    r"Nothing is kept for the next call, unless it is made in a session \(session_id\): "
    r"that keeps ([^.]*)\."
)
"""The sentence about sessions in built-in tools' descriptions. MCP calls have no such option."""

_NOT_KEPT = "Nothing is kept for the next call."


def tool_to_mcp(
    tool: ToolDefinition, *, with_output: bool = True, in_session: bool = False
) -> JsonObject:
    """Convert a tool to its form in a result of `tools/list`.

    `with_output` adds the output schema, which protocol versions before 2025-06-18 do not support.
    `in_session` tells whether the client's calls run in a session, which the description mentions.
    """
    kept = r"For the next call the session keeps \1." if in_session else _NOT_KEPT
    description = _KEPT.sub(kept, tool.description)
    shape: JsonObject = {
        "name": tool.name,
        "description": description.replace("Only in a session (session_id). ", ""),
        "inputSchema": {**tool.parameters, "type": "object"},
        "annotations": {
            "readOnlyHint": tool.read_only,
            "destructiveHint": tool.dangerous,
            "idempotentHint": tool.idempotent,
            "openWorldHint": tool.type in (ToolType.REST, ToolType.MCP),
        },
    }
    if with_output and tool.output_schema is not None:
        output = {**tool.output_schema, "type": "object"}
        # If a text was shortened, `data` also has notes next to the tool's own fields.
        output.pop("additionalProperties", None)
        shape["outputSchema"] = output
    return shape
