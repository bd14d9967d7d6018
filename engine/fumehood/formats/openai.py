"""The formats of OpenAI's two APIs: Chat Completions and Responses.

A tool is exported in strict mode if its schema can be expressed in strict mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.formats.base import (
    AUTO,
    NONE,
    REQUIRED,
    ChatFormat,
    items_of,
    object_of,
    result_text,
    text_of,
)
from fumehood.formats.model import Loss, ModelCall
from fumehood.formats.schemas import Dialect, fit, without_unions

# *Source*: the guide to structured outputs, "Supported schemas".
STRICT = Dialect(
    keywords=frozenset(
        {
            "pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
            "minItems", "maxItems",
        }
    ),
    formats=frozenset(
        {
            "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
        }
    ),
    is_strict=True,
    requires_all=True,
    max_levels=10,
)  # fmt: skip


def _function(tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
    fitted = fit(tool, STRICT)
    losses, faults = fitted.losses, fitted.faults
    if faults:
        fitted = without_unions(tool)
        losses = [*faults, *fitted.losses]
    function: JsonObject = {
        "name": tool.name,
        "description": tool.description,
        "parameters": fitted.schema,
        "strict": not faults,
    }
    return function, losses


def _call(call_id: Any, function: JsonObject) -> ModelCall:
    return ModelCall(text_of(call_id), text_of(function.get("name")), function.get("arguments"))


class OpenAIChat(ChatFormat):
    """The format of OpenAI's Chat Completions API: calls are in a message's `tool_calls`."""

    name = "openai"
    dialect = STRICT

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool to a `function`, in strict mode if its schema allows that. Also return
        what the format cannot express.
        """
        function, losses = _function(tool)
        return {"type": "function", "function": function}, losses

    def turn(self, message: Any) -> list[JsonObject]:
        """Return the assistant's message in a list. In a whole response, this is the message of the
        first choice.
        """
        message = object_of(message, "it")
        if "choices" in message:
            choice = next(items_of(message["choices"], "choices"), {})
            message = object_of(choice.get("message"), "choices.0.message")
        return [{**message, "role": "assistant"}]

    def calls(self, turn: Sequence[JsonObject]) -> list[ModelCall]:
        """Return the calls in the message's `tool_calls`. The name of a call whose type is not
        `function` is empty.
        """
        calls = [item for m in turn for item in items_of(m.get("tool_calls"), "tool_calls")]
        functions = [call.get("function") for call in calls]
        return [
            _call(call.get("id"), function if isinstance(function, dict) else {})
            for call, function in zip(calls, functions, strict=True)
        ]

    def results(
        self, calls: Sequence[ModelCall], envelopes: Sequence[Envelope], max_length: int
    ) -> list[JsonObject]:
        """Return one message with the role `tool` for each call."""
        return [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": result_text(envelope, max_length),
            }
            for call, envelope in zip(calls, envelopes, strict=True)
        ]

    def choice(self, tool_choice: str) -> Any:
        """Convert the engine's `tool_choice` to the API's parameter with the same name."""
        if tool_choice in (AUTO, NONE, REQUIRED):
            return tool_choice
        return {"type": "function", "function": {"name": tool_choice}}


class OpenAIResponses(ChatFormat):
    """The format of OpenAI's Responses API: each call and each result is a separate item."""

    name = "openai-responses"
    dialect = STRICT

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool to a `function`, in strict mode if its schema allows that. Also return
        what the format cannot express.
        """
        function, losses = _function(tool)
        return {"type": "function", **function}, losses

    def turn(self, message: Any) -> list[JsonObject]:
        """Return the model's items. `message` is a whole response, a list of items, or one item."""
        if isinstance(message, dict):
            message = message.get("output", [message])
        return list(items_of(message, "the output"))

    def calls(self, turn: Sequence[JsonObject]) -> list[ModelCall]:
        """Return the calls in the items of type `function_call`."""
        return [
            _call(item.get("call_id"), item) for item in turn if item.get("type") == "function_call"
        ]

    def results(
        self, calls: Sequence[ModelCall], envelopes: Sequence[Envelope], max_length: int
    ) -> list[JsonObject]:
        """Return one `function_call_output` item for each call."""
        return [
            {
                "type": "function_call_output",
                "call_id": call.id,
                "output": result_text(envelope, max_length),
            }
            for call, envelope in zip(calls, envelopes, strict=True)
        ]

    def choice(self, tool_choice: str) -> Any:
        """Convert the engine's `tool_choice` to the API's parameter with the same name."""
        if tool_choice in (AUTO, NONE, REQUIRED):
            return tool_choice
        return {"type": "function", "name": tool_choice}
