"""Exported tools: definitions that are converted to a provider's format, or to a format that a part
adds.

A tool is converted again only if its definition has changed. The registry never changes a
definition's object, but replaces it by a new object. A definition that is still the same object is
therefore unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date

from fumehood.core.json_types import JsonObject
from fumehood.core.part import imported
from fumehood.core.tool import ToolDefinition
from fumehood.formats.base import Format
from fumehood.formats.model import ExportedTools, FormatName, Loss
from fumehood.formats.table import CHAT_FORMATS
from fumehood.parts import parts
from fumehood.registry.json_schema import CompiledSchema, TooCostly


class OfPart(Format):
    """A format that another part adds (`Part.exports`). It can only export tools, and never reports
    losses.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool with the part's function. The list of losses is empty."""
        return imported(self._place)(tool), []


FORMATS: Mapping[str, Format] = {
    **CHAT_FORMATS,
    **{name: OfPart(place) for part in parts() for name, place in part.exports.items()},
}

_Kept = tuple[ToolDefinition, JsonObject, list[Loss]]


class Exports:
    """The cached exports: the converted form of each tool, by format and name of the tool."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _Kept]] = {}

    def of_all(self, name: FormatName, tools: Iterable[ToolDefinition]) -> ExportedTools:
        """Export all tools. Afterwards, the cache for this format contains exactly the converted
        forms of these tools.
        """
        found = [self._one(name, tool) for tool in tools]
        self._kept[name] = {kept[0].name: kept for kept in found}
        return _exported(name, found)

    def of_some(self, name: FormatName, tools: Iterable[ToolDefinition]) -> ExportedTools:
        """Export only some tools, or tools as an agent sees them. The cache is used, but not
        changed.
        """
        return _exported(name, [self._one(name, tool) for tool in tools])

    def _one(self, name: FormatName, tool: ToolDefinition) -> _Kept:
        kept = self._kept.get(name, {}).get(tool.name)
        return kept if kept is not None and kept[0] is tool else _converted(name, tool)


def is_offered(tool: ToolDefinition, today: date) -> bool:
    """Return True if a tool is enabled and, on the date `today`, not past its sunset date."""
    return tool.is_active and (tool.sunset_date is None or tool.sunset_date >= today)


def _exported(name: FormatName, found: list[_Kept]) -> ExportedTools:
    tools = FORMATS[name].tools([made for _, made, _ in found])
    losses = tuple(loss for _, _, losses in found for loss in losses)
    return ExportedTools.model_construct(format=name, tools=tools, losses=losses)


def _converted(name: FormatName, tool: ToolDefinition) -> _Kept:
    """Convert a tool to the format `name`. If an example violates the tool's own schema, it is left
    out.
    """
    shown = tool.for_models()
    if not tool.input_examples or name != "anthropic":
        return tool, *FORMATS[name].tool(shown)
    schema = CompiledSchema(shown.parameters)
    # The provider would refuse every request that contains an unsound example.
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
