"""The format of Anthropic's Messages API.

A tool is exported in strict mode only if its definition requests strict mode and its schema allows
it. Not every tool is, because the API accepts at most 20 strict tools in a request.
"""

from __future__ import annotations

import re
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
from fumehood.formats.schemas import Dialect, aliased, fit, with_aliases, without_unions

PROPERTY_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""Matches the property names that the API accepts. A property with another name is sent under an
alias."""


# *Source*: `anthropic.lib._parse._transform`, which keeps the keywords that the API accepts.
STRICT = Dialect(
    keywords=frozenset(),
    formats=frozenset(
        {
            "date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6",
            "uuid",
        }
    ),
    is_strict=True,
    has_type_lists=False,
    has_recursion=False,
    property_name=PROPERTY_NAME,
)  # fmt: skip


class Anthropic(ChatFormat):
    """The format of Anthropic's Messages API: calls are `tool_use` blocks, and results are
    `tool_result` blocks.
    """

    name = "anthropic"
    dialect = STRICT

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool, including its `input_examples`. Also return what the format cannot
        express.
        """
        made: JsonObject = {"name": tool.name, "description": tool.description}
        fitted = without_unions(tool)
        fitted.schema = with_aliases(fitted.schema, PROPERTY_NAME)
        losses = fitted.losses
        if tool.strict:
            strict = fit(tool, STRICT)
            if strict.faults:
                losses = [*strict.faults, *losses]
            else:
                fitted, losses = strict, strict.losses
            made["strict"] = not strict.faults
        made["input_schema"] = fitted.schema
        if tool.input_examples:
            made["input_examples"] = [
                aliased(example, tool.parameters, STRICT) for example in tool.input_examples
            ]
        return made, losses

    def turn(self, message: Any) -> list[JsonObject]:
        """Return the assistant's message with only its role and its content, which is a text or a
        list of blocks.
        """
        content = object_of(message, "it").get("content")
        if not isinstance(content, str):
            content = list(items_of(content, "content"))
        return [{"role": "assistant", "content": content}]

    def calls(self, turn: Sequence[JsonObject]) -> list[ModelCall]:
        """Return the calls in the `tool_use` blocks of the turn."""
        return [
            ModelCall(text_of(block.get("id")), text_of(block.get("name")), block.get("input"))
            for message in turn
            if not isinstance(message["content"], str)
            for block in message["content"]
            if block.get("type") == "tool_use"
        ]

    def results(
        self, calls: Sequence[ModelCall], envelopes: Sequence[Envelope], max_length: int
    ) -> list[JsonObject]:
        """Return one user message with the results of all calls, because the API refuses results in
        separate messages.
        """
        blocks = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": result_text(envelope, max_length),
                "is_error": not envelope.success,
            }
            for call, envelope in zip(calls, envelopes, strict=True)
        ]
        return [{"role": "user", "content": blocks}] if blocks else []

    def choice(self, tool_choice: str) -> Any:
        """Convert the engine's `tool_choice` to the API's parameter with the same name."""
        kind = {AUTO: "auto", NONE: "none", REQUIRED: "any"}.get(tool_choice)
        return {"type": kind} if kind is not None else {"type": "tool", "name": tool_choice}
