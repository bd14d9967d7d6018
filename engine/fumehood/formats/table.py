"""The table of all providers' formats by name. `exports.py` adds formats that can only export
tools.
"""

from __future__ import annotations

from collections.abc import Mapping

from fumehood.formats.anthropic import Anthropic
from fumehood.formats.base import ChatFormat
from fumehood.formats.gemini import Gemini
from fumehood.formats.openai import OpenAIChat, OpenAIResponses

CHAT_FORMATS: Mapping[str, ChatFormat] = {
    each.name: each for each in (OpenAIChat(), OpenAIResponses(), Anthropic(), Gemini())
}
