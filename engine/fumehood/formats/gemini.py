"""The format of the Gemini API. Parameters are described in the subset of JSON Schema that Gemini
supports.
"""

from __future__ import annotations

import json
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
from fumehood.formats.schemas import Dialect, fit

# *Source*: google.genai.types.FunctionDeclaration (names), and the API's page on
# `responseJsonSchema` (keywords), which also applies to parameters.
KNOWN = Dialect(
    keywords=frozenset({"format", "minItems", "maxItems", "minimum", "maximum"}),
    property_name=re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}"),
)


class Gemini(ChatFormat):
    """The format of the Gemini API: a message is a `Content`, whose parts contain calls and
    results.
    """

    name = "gemini"
    dialect = KNOWN

    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool to a function declaration. Also return what the format cannot
        express.
        """
        schema = fit(tool, KNOWN)
        declared: JsonObject = {
            "name": tool.name,
            "description": tool.description,
            "parameters_json_schema": schema.schema,
        }
        return declared, schema.losses

    def tools(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        """Return one Gemini tool that contains all function declarations, or an empty tuple if
        there are none.
        """
        return ({"function_declarations": list(tools)},) if tools else ()

    def turn(self, message: Any) -> list[JsonObject]:
        """Return the model's content in a list. In a whole response, this is the content of the
        first candidate.
        """
        message = object_of(message, "it")
        if "candidates" in message:
            candidate = next(items_of(message["candidates"], "candidates"), {})
            message = object_of(candidate.get("content"), "candidates.0.content")
        return [{**message, "role": "model"}]

    def calls(self, turn: Sequence[JsonObject]) -> list[ModelCall]:
        """Return the calls in the parts of the model's content.

        The id of a call is None if Gemini gives it no id. Gemini then matches the results to the
        calls by their order.
        """
        found = []
        for message in turn:
            for part in items_of(message.get("parts"), "parts"):
                call = part.get("function_call", part.get("functionCall"))
                if call is not None:
                    call = object_of(call, "a function call")
                    # Protocol buffers write a missing id as an empty text.
                    call_id, name = text_of(call.get("id")) or None, text_of(call.get("name"))
                    found.append(ModelCall(call_id, name, call.get("args", {})))
        return found

    def results(
        self, calls: Sequence[ModelCall], envelopes: Sequence[Envelope], max_length: int
    ) -> list[JsonObject]:
        """Return one user content that contains a function response for each call."""
        parts = [
            {"function_response": _response(call, envelope, max_length)}
            for call, envelope in zip(calls, envelopes, strict=True)
        ]
        return [{"role": "user", "parts": parts}] if parts else []

    def choice(self, tool_choice: str) -> Any:
        """Convert the engine's `tool_choice` to the API's parameter `tool_config`."""
        modes = {AUTO: "AUTO", NONE: "NONE", REQUIRED: "ANY"}
        config: JsonObject = {"mode": modes.get(tool_choice, "ANY")}
        if tool_choice not in modes:
            config["allowed_function_names"] = [tool_choice]
        return {"function_calling_config": config}


def _response(call: ModelCall, envelope: Envelope, max_length: int) -> JsonObject:
    named = {"name": call.name or "unknown"} | ({} if call.id is None else {"id": call.id})
    text = result_text(envelope, max_length)
    if not envelope.success:
        return {**named, "response": {"error": text}}
    try:
        return {**named, "response": {"output": json.loads(text)}}
    except ValueError:  # it was cut, so it is not JSON
        return {**named, "response": {"output": text}}
