"""Every provider's format by its name. `exports.py` adds those that have tools only."""

from __future__ import annotations

from collections.abc import Mapping

from fumehood.formats.anthropic import Anthropic
from fumehood.formats.base import ChatFormat
from fumehood.formats.gemini import Gemini
from fumehood.formats.openai import OpenAIChat, OpenAIResponses

CHAT_FORMATS: Mapping[str, ChatFormat] = {
    each.name: each for each in (OpenAIChat(), OpenAIResponses(), Anthropic(), Gemini())
}
