"""Every format against the real libraries' own types: tools, messages, choices."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, MessageParam, ToolChoiceParam, ToolParam
from google.genai import types as genai
from mcp_types import Tool as McpTool
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionMessage,
    ChatCompletionToolChoiceOptionParam,
    ChatCompletionToolMessageParam,
    ChatCompletionToolParam,
)
from openai.types.responses import FunctionToolParam, Response, ResponseInputItemParam
from openai.types.responses.response_create_params import ToolChoice
from pydantic import TypeAdapter

from fumehood import Envelope
from fumehood.core.errors import InvalidParams
from fumehood.core.tool import ToolDefinition
from fumehood.formats.agent_loop import plain
from fumehood.formats.base import AUTO, NONE, REQUIRED, result_text
from fumehood.formats.exports import FORMATS, Exports
from fumehood.formats.model import ModelCall
from fumehood.formats.table import CHAT_FORMATS
from fumehood.protocol.messages import decode_envelope
from fumehood.registry.definitions import parse_definition
from fumehood_tools.run_shell import run_shell
from support.answers import envelope_bytes
from support.recording import bench

TOOLS: dict[str, Any] = {
    "openai": ChatCompletionToolParam,
    "openai-responses": FunctionToolParam,
    "anthropic": ToolParam,
    "gemini": genai.Tool,
    "mcp": McpTool,
}
CHOICES: dict[str, Any] = {
    "openai": ChatCompletionToolChoiceOptionParam,
    "openai-responses": ToolChoice,
    "anthropic": ToolChoiceParam,
    "gemini": genai.ToolConfig,
}
ARGUMENTS = {"expression": "6 * 7", "precision": None}


def tools_of_every_kind() -> list[ToolDefinition]:
    rest = {
        "name": "get_weather", "type": "REST", "description": "Get the weather of a city.",
        "endpoint": "https://api.example/v1/{city}", "method": "GET", "timeout": 1234,
        "headers": {"x-internal": "secret-header"}, "retry_count": 3, "rate_limit": 77,
        "read_only": True, "timeout_seconds": 5.5, "strict": True,
        "cost_per_use": "0.125", "tags": ["hidden-tag"], "category": "hidden-category",
        "parameters": {
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"], "additionalProperties": False,
        },
        "input_examples": [{"city": "Oslo", "unit": "c"}, {"town": "Oslo"}],
    }  # fmt: skip
    free = {
        "name": "send_anything", "type": "MCP", "description": "Send it.", "dangerous": True,
        "parameters": {"properties": {"body": {"type": "object"}}},
        "output_schema": {"type": "object", "properties": {"id": {"type": "string"}}},
    }  # fmt: skip
    none = {"name": "ping", "type": "MCP", "description": "Ping.", "parameters": {"properties": {}}}
    return [parse_definition(document) for document in (rest, free, none)]


@pytest.mark.row("T8")
@pytest.mark.anyio
@pytest.mark.parametrize("name", list(FORMATS))
async def test_provider_library_accepts_every_exported_tool(name: Any, home: Path) -> None:
    async with bench(home) as b:
        found = [*b.engine.tools(), *tools_of_every_kind()]
    exported = Exports().of_all(name, found)
    adapter = TypeAdapter(TOOLS[name])
    for made in exported.tools:
        checked = adapter.validate_python(json.loads(json.dumps(made)), strict=False)
        if name == "gemini":
            assert len(checked.function_declarations) == len(found)
    assert len(exported.tools) == (1 if name == "gemini" else len(found))
    for loss in exported.losses:
        assert loss.tool in [tool.name for tool in found]
        assert loss.where
        assert loss.what
        assert loss.change


@pytest.mark.row("T6", "T8")
@pytest.mark.parametrize("name", list(FORMATS))
def test_export_hides_how_a_tool_runs(name: Any) -> None:
    text = json.dumps([dict(tool) for tool in Exports().of_all(name, tools_of_every_kind()).tools])
    for hidden in (
        "api.example", "secret-header", "endpoint", "executor", "http", "timeout", "memory",
        "sandbox", "retry", "rate_limit", "77", "1234", "5.5", "hidden", "0.125",
        "version", "1.0.0", "REST",
    ):  # fmt: skip
        assert hidden not in text, hidden
    assert "get_weather" in text


@pytest.mark.row("T8")
@pytest.mark.row("P10")
@pytest.mark.parametrize("name", TOOLS)
def test_export_for_models_omits_client_only_fields(name: Any) -> None:
    exported = Exports().of_all(name, [run_shell])
    assert exported.losses == () or name == "gemini" or "openai" in name
    (schema,) = [found for tool in exported.tools for found in schemas_in(tool)]
    assert list(schema["properties"]) == ["command", "stdin", "files"]
    assert schema["required"][0] == "command"
    assert {"argv", "env", "return_files"} <= run_shell.parameters["properties"].keys()


def schemas_in(value: Any) -> list[Any]:
    """The schemas of parameters in an exported tool."""
    if isinstance(value, list):
        return [found for item in value for found in schemas_in(item)]
    if not isinstance(value, dict):
        return []
    if "properties" in value:
        return [value] if "command" in value["properties"] else []
    return [found for item in value.values() for found in schemas_in(item)]


def test_anthropic_export_has_valid_examples_and_strict_mode() -> None:
    exported = Exports().of_all("anthropic", tools_of_every_kind())
    weather, anything, _ = exported.tools
    assert weather["strict"] is True
    assert weather["input_examples"] == [{"city": "Oslo", "unit": "c"}]
    assert "strict" not in anything
    assert [(loss.tool, loss.where) for loss in exported.losses] == [
        ("get_weather", "input_examples")
    ]
    strict = tools_of_every_kind()[1].model_copy(update={"strict": True})
    exported = Exports().of_some("anthropic", [strict])
    assert exported.tools[0]["strict"] is False
    assert exported.losses[0].what.startswith("strict is false: ")


@pytest.mark.parametrize("name", list(CHOICES))
@pytest.mark.parametrize("choice", [AUTO, NONE, REQUIRED, "calculator"])
def test_provider_library_accepts_every_tool_choice(name: str, choice: str) -> None:
    TypeAdapter(CHOICES[name]).validate_python(CHAT_FORMATS[name].choice(choice))


# -- Messages: the libraries' own objects in, what they accept out ----------------------------

CALL = {"name": "calculator", "arguments": json.dumps(ARGUMENTS)}
CHAT = ChatCompletion.model_validate(
    {
        "id": "c", "created": 0, "model": "m", "object": "chat.completion",
        "choices": [
            {
                "index": 0, "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant", "content": None,
                    "tool_calls": [{"id": "id1", "type": "function", "function": CALL}],
                },
            }
        ],
    }
)  # fmt: skip
RESPONSE = Response.model_validate(
    {
        "id": "r", "created_at": 0, "model": "m", "object": "response", "tools": [],
        "parallel_tool_calls": True, "tool_choice": "auto",
        "output": [
            {"type": "reasoning", "id": "rs", "summary": []},
            {"type": "function_call", "id": "fc", "call_id": "id1", **CALL},
        ],
    }
)  # fmt: skip
MESSAGE = Message.model_validate(
    {
        "id": "m", "model": "m", "role": "assistant", "type": "message",
        "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
        "content": [
            {"type": "text", "text": "I calculate."},
            {"type": "tool_use", "id": "id1", "name": "calculator", "input": ARGUMENTS},
        ],
    }
)  # fmt: skip
CONTENT = genai.GenerateContentResponse.model_validate(
    {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "I calculate."},
                        {"function_call": {"id": "id1", "name": "calculator", "args": ARGUMENTS}},
                    ],
                }
            }
        ]
    }
)
WHOLE = {"openai": CHAT, "openai-responses": RESPONSE, "anthropic": MESSAGE, "gemini": CONTENT}
PART: dict[str, Any] = {
    "openai": CHAT.choices[0].message,
    "openai-responses": RESPONSE.output[1],
    "anthropic": {"role": "assistant", "content": MESSAGE.content},
    "gemini": CONTENT.candidates[0].content,  # type: ignore[index]
}


@pytest.mark.row("P10")
@pytest.mark.parametrize("name", list(CHAT_FORMATS))
@pytest.mark.parametrize("messages", [WHOLE, PART], ids=["response", "message"])
def test_tool_calls_are_found_in_provider_library_objects(name: str, messages: Any) -> None:
    chat, message = CHAT_FORMATS[name], messages[name]
    (call,) = chat.calls(chat.turn(plain(message)))
    arguments = json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments
    assert (call.id, call.name, arguments) == ("id1", "calculator", ARGUMENTS)


CONVERSATION: dict[str, Any] = {
    "openai": ChatCompletionToolMessageParam,
    "openai-responses": ResponseInputItemParam,
    "anthropic": MessageParam,
    "gemini": genai.Content,
}


def envelope(data: Any, **error: Any) -> Envelope:
    return decode_envelope(envelope_bytes(data, **error))


@pytest.mark.row("P10")
@pytest.mark.parametrize("name", list(CHAT_FORMATS))
def test_provider_library_accepts_every_result_message(name: str) -> None:
    chat = CHAT_FORMATS[name]
    calls = [ModelCall("id1", "a", {}), ModelCall("id2", "b", {})]
    answers = [envelope({"value": 42}), envelope({}, code="PERMISSION_DENIED")]
    messages = json.loads(json.dumps(chat.results(calls, answers, 2000)))
    for message in messages:
        TypeAdapter(CONVERSATION[name]).validate_python(message)
    turns = chat.turn(plain(WHOLE[name]))
    if name == "openai":
        ChatCompletionMessage.model_validate(turns[0])
    elif name != "openai-responses":
        TypeAdapter(CONVERSATION[name]).validate_python(turns[0])


@pytest.mark.row("P10")
def test_results_have_the_shape_of_each_provider() -> None:
    calls = [ModelCall("id1", "a", {}), ModelCall(None, "b", {})]
    answers = [envelope({"value": 42}), envelope({}, code="TIMEOUT")]
    assert CHAT_FORMATS["openai"].results(calls[:1], answers[:1], 99) == [
        {"role": "tool", "tool_call_id": "id1", "content": '{"value":42}'}
    ]
    assert CHAT_FORMATS["openai-responses"].results(calls[:1], answers[:1], 99) == [
        {"type": "function_call_output", "call_id": "id1", "output": '{"value":42}'}
    ]
    (message,) = CHAT_FORMATS["anthropic"].results(calls, answers, 99)
    assert message["role"] == "user"
    assert [(b["type"], b["is_error"]) for b in message["content"]] == [
        ("tool_result", False), ("tool_result", True),
    ]  # fmt: skip
    (content,) = CHAT_FORMATS["gemini"].results(calls, answers, 99)
    assert [part["function_response"] for part in content["parts"]] == [
        {"id": "id1", "name": "a", "response": {"output": {"value": 42}}},
        {"name": "b", "response": {"error": "TIMEOUT: No."}},
    ]


@pytest.mark.parametrize("name", list(CHAT_FORMATS))
@pytest.mark.parametrize(
    "message",
    [
        None, 7, "text", [7], {"tool_calls": 7}, {"tool_calls": [7]}, {"content": 7},
        {"content": [7]}, {"parts": 7}, {"parts": [{"function_call": 7}]}, {"output": 7},
        {"choices": []}, {"candidates": [{}]},
    ],
)  # fmt: skip
def test_malformed_message_is_refused_or_has_no_calls(name: str, message: Any) -> None:
    chat = CHAT_FORMATS[name]
    with suppress(InvalidParams):
        assert chat.calls(chat.turn(message)) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("openai", {"tool_calls": [{"id": call_id}]})
        for call_id in ("", None, 7, {})
    ] + [
        ("openai-responses", {"output": [{"type": "function_call"}]}),
        ("anthropic", {"content": [{"type": "tool_use", "id": ""}]}),
    ],
)  # fmt: skip
def test_call_without_an_id_is_a_call_with_an_empty_one(name: str, message: Any) -> None:
    chat = CHAT_FORMATS[name]
    (call,) = chat.calls(chat.turn(message))
    assert (call.id, call.name) == ("", "")


def test_empty_id_of_gemini_is_no_id() -> None:
    chat = CHAT_FORMATS["gemini"]
    parts = [{"function_call": {"id": "", "name": "a", "args": {}}}] * 2
    assert [call.id for call in chat.calls(chat.turn({"parts": parts}))] == [None, None]


# -- The text that a model reads ----------------------------------------------------------------


@pytest.mark.row("P11")
@pytest.mark.parametrize("max_length", [1, 10, 70, 200, 2000])
@pytest.mark.parametrize(
    "data",
    [
        {"stdout": "line\n" * 5000, "stderr": "", "value": None},
        {"a": "x" * 5000, "b": "y" * 5000, "c": ["z" * 300] * 40},
        {"value": list(range(5000))},
        {"url": "u" * 3000},
        {"value": 1},
    ],
)
def test_text_for_a_model_has_at_most_max_length_characters(
    data: dict[str, Any], max_length: int
) -> None:
    for answer in (envelope(data), envelope({}, code="X", message="m" * 3000)):
        assert len(result_text(answer, max_length)) <= max_length


@pytest.mark.row("P11")
def test_long_text_keeps_both_ends_and_the_json_around_it() -> None:
    text = result_text(envelope({"stdout": "a" + "x" * 9000 + "z", "exit_code": 0}), 2000)
    shown = json.loads(text)
    assert shown["exit_code"] == 0
    assert shown["stdout"].startswith("ax")
    assert shown["stdout"].endswith("xz")
    assert "characters left out" in shown["stdout"]
    assert len(text) > 1400


def test_file_contents_are_omitted_from_model_text() -> None:
    file = {"filename": "a.png", "content_type": "image/png", "size": 3, "content_base64": "AAAA"}
    text = result_text(envelope({"images": [file], "files": [file], "value": "ä"}), 2000)
    assert "base64" not in text
    assert text.count("a.png") == 2
    assert "ä" in text


def test_tool_past_its_sunset_is_not_offered() -> None:
    from fumehood.formats.exports import is_offered

    tool, today = tools_of_every_kind()[0], date(2026, 5, 5)
    assert is_offered(tool, today)
    assert is_offered(tool.model_copy(update={"sunset_date": today}), today)
    assert not is_offered(tool.model_copy(update={"sunset_date": date(2026, 5, 4)}), today)
    assert not is_offered(tool.model_copy(update={"is_active": False}), today)


@pytest.mark.parametrize("value", [3, "two of them", {"a": 1}])
def test_tool_may_give_the_names_of_file_lists_another_meaning(value: Any) -> None:
    assert json.loads(result_text(envelope({"files": value}), 2000)) == {"files": value}
