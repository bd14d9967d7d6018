"""Every format by its name."""

from __future__ import annotations

from collections.abc import Mapping

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.formats.anthropic import Anthropic
from fumehood.formats.base import ChatFormat, Format
from fumehood.formats.gemini import Gemini
from fumehood.formats.mcp import tool_to_mcp
from fumehood.formats.model import Loss
from fumehood.formats.openai import OpenAIChat, OpenAIResponses


class Mcp(Format):
    """The Model Context Protocol: tools only; `fumehood mcp` answers its calls."""

    name = "mcp"

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """One tool; nothing gets lost."""
        return tool_to_mcp(tool), []


CHAT_FORMATS: Mapping[str, ChatFormat] = {
    each.name: each for each in (OpenAIChat(), OpenAIResponses(), Anthropic(), Gemini())
}
FORMATS: Mapping[str, Format] = {**CHAT_FORMATS, "mcp": Mcp()}
