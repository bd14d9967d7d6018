"""Tool calls of an assistant message: one result per call, whatever its outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fumehood import AgentRun, tool
from fumehood.core.errors import InvalidParams, ToolNotFound
from fumehood.formats.message_calls import REPAIRED, parse_message, parse_own_message
from fumehood.formats.model import HandledCalls
from support.answers import code_of
from support.identities import bind, make_agent
from support.recording import Bench, bench

pytestmark = pytest.mark.anyio

RAN: list[dict[str, Any]] = []


@tool(sandboxed=False, read_only=True)
async def find_city(name: str, limit: int = 3, country: str | None = None) -> dict[str, Any]:
    """Find a city."""
    RAN.append({"name": name, "limit": limit, "country": country})
    if name == "Atlantis":
        raise ValueError("no such city")
    return {"city": name, "limit": limit}


@tool(sandboxed=False)
async def tell(length: int) -> dict[str, str]:
    """Tell something long."""
    return {"text": "a" + "x" * length + "z"}


@tool(sandboxed=False, read_only=True)
async def ping() -> dict[str, bool]:
    """Answer."""
    return {"pong": True}


@tool(sandboxed=False, dangerous=True)
async def wipe(path: str) -> None:
    """Wipe a disk."""
    RAN.append({"path": path})
    raise AssertionError("a dangerous tool ran without approval")


@pytest.fixture
async def b(home: Path) -> AsyncIterator[Bench]:
    RAN.clear()
    async with bench(home, [find_city, tell, ping, wipe]) as made:
        yield made


def call(name: Any, arguments: Any, call_id: str = "id1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def message(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


async def handled(b: Bench, body: Any, **options: Any) -> HandledCalls:
    request = parse_own_message(body, "openai", options)
    return await b.engine.open_message(request, b.engine.owner).run()


def codes(answer: HandledCalls) -> list[str]:
    return [code_of(e) for e in answer.envelopes]


@pytest.mark.row("P10")
async def test_every_tool_call_gets_one_result_in_order(b: Bench) -> None:
    calls = [
        call("find_city", {"name": "Oslo"}, "1"),
        call("nothing", {}, "2"),
        call("find_city", "{no json", "3"),
        call("wipe", {"path": "/"}, "4"),
        call("find_city", {"name": "Atlantis"}, "5"),
        call("find_city", {}, "6"),
        {"id": "7", "type": "custom", "custom": {"name": "find_city", "input": "x"}},
        call("find_city", "[1]", "8"),
        call("find_city", {"name": "Rome"}, "9"),
        call(7, {}, "10"),
        call("x" * 300, {}, "11"),
    ]
    answer = await handled(b, message(*calls))
    assert codes(answer) == [
        "OK", "TOOL_NOT_FOUND", "INVALID_PARAMS", "REQUIRES_HUMAN_APPROVAL", "EXECUTION_ERROR",
        "INVALID_PARAMS", "INVALID_PARAMS", "INVALID_PARAMS", "OK", "INVALID_PARAMS",
        "INVALID_PARAMS",
    ]  # fmt: skip
    assert [m["tool_call_id"] for m in answer.messages] == [c["id"] for c in calls]
    assert [e.metadata.tool_name for e in answer.envelopes][:2] == ["find_city", "nothing"]
    for found, envelope in zip(answer.messages, answer.envelopes, strict=True):
        assert found["role"] == "tool"
        if envelope.error is not None:
            start = f"{envelope.error.code}: {envelope.error.message}"
            assert found["content"].startswith(start)
    assert sorted(ran["name"] for ran in RAN) == ["Atlantis", "Oslo", "Rome"]


async def test_duplicate_tool_call_id_is_answered_with_error_and_not_run(b: Bench) -> None:
    twice = [call("find_city", {"name": name}, "same") for name in ("Oslo", "Rome")]
    answer = await handled(b, message(*twice, call("find_city", {"name": "Bern"}, "other")))
    assert codes(answer) == ["OK", "INVALID_PARAMS", "OK"]
    assert "same id" in answer.messages[1]["content"]
    assert [ran["name"] for ran in RAN] == ["Oslo", "Bern"]


async def test_call_without_an_id_is_refused_and_the_others_run(b: Bench) -> None:
    calls = [call("find_city", {"name": name}, own) for name, own in (
        ("Oslo", "1"), ("Rome", ""), ("Paris", ""), ("Bern", "2"),
    )]  # fmt: skip
    answer = await handled(b, message(*calls))
    assert codes(answer) == ["OK", "INVALID_PARAMS", "INVALID_PARAMS", "OK"]
    assert "has no id" in answer.messages[1]["content"]
    assert [m["tool_call_id"] for m in answer.messages] == ["1", "", "", "2"]
    assert [ran["name"] for ran in RAN] == ["Oslo", "Bern"]


NO_ARGUMENTS = [
    "",
    " ",
    "\n",
    "\t \r\n",
    "null",
    " null\n",
    "\ufeff",
    "\ufeff null",
    None,
    {},
    "{}",
]


@pytest.mark.parametrize("arguments", NO_ARGUMENTS)
async def test_blank_or_null_arguments_are_none(b: Bench, arguments: Any) -> None:
    call_ = {"id": "1", "type": "function", "function": {"name": "ping", "arguments": arguments}}
    for options in ({}, {"repair_arguments": True}):
        answer = await handled(b, message(call_), **options)
        assert codes(answer) == ["OK"]
        assert answer.envelopes[0].metadata.warnings == ()


@pytest.mark.parametrize("arguments", ["nul", "NULL", "null null", "\u00a0", '"null"', "0", "[]"])
async def test_other_arguments_that_are_no_object_are_refused(b: Bench, arguments: str) -> None:
    assert codes(await handled(b, message(call("ping", arguments, "1")))) == ["INVALID_PARAMS"]


async def test_message_with_too_many_calls_is_refused(b: Bench) -> None:
    many = [call("find_city", {"name": "Oslo"}, str(number)) for number in range(1001)]
    with pytest.raises(InvalidParams, match="1001 tool calls; at most 1000"):
        await handled(b, message(*many))
    assert RAN == []
    answer = await handled(b, message(*many[:1000]))
    assert (len(answer.messages), set(codes(answer))) == (1000, {"OK"})


@pytest.mark.parametrize(
    "arguments",
    [
        '{"name": ' + "[" * 100_000,
        '{"name": "a", "name": "b"}',
        '{"name": NaN}',
        '{"name": "\\ud800"}',
        '{"name": 1' + "0" * 5000 + "}",
        '"name"', "null x", "[]", "7", "\x00", "{" * 10_000,
    ],
    ids=range(11),
)  # fmt: skip
async def test_hostile_arguments_get_an_error_and_next_call_runs(b: Bench, arguments: str) -> None:
    body = message(call("find_city", arguments, "1"), call("find_city", {"name": "Oslo"}, "2"))
    for repair in (False, True):
        answer = await handled(b, body, repair_arguments=repair)
        first, second = codes(answer)
        assert second == "OK"
        if first == "OK":  # what can be guessed is, on request
            assert repair
            assert REPAIRED in answer.envelopes[0].metadata.warnings
        else:
            assert first == "INVALID_PARAMS"


# -- Repairs -------------------------------------------------------------------------------------

BROKEN = '{"name": "Oslo", "limit": 2,'


@pytest.mark.row("P10")
async def test_malformed_json_is_repaired_only_on_request_with_warning(b: Bench) -> None:
    assert codes(await handled(b, message(call("find_city", BROKEN)))) == ["INVALID_PARAMS"]
    both = message(call("find_city", BROKEN, "1"), call("find_city", {"name": "Rome"}, "2"))
    answer = await handled(b, both, repair_arguments=True)
    assert codes(answer) == ["OK", "OK"]
    assert answer.envelopes[0].data == {"city": "Oslo", "limit": 2}
    flags = [REPAIRED in envelope.metadata.warnings for envelope in answer.envelopes]
    assert flags == [True, False]


async def test_arguments_of_a_dangerous_or_unknown_tool_are_never_repaired(b: Bench) -> None:
    broken = '{"path": "/tmp",'
    answer = await handled(
        b, message(call("wipe", broken, "1"), call("nothing", broken, "2")), repair_arguments=True
    )
    assert codes(answer) == ["INVALID_PARAMS", "INVALID_PARAMS"]
    twin = await handled(b, message(call("wipe", {"path": "/tmp"})), repair_arguments=True)
    assert codes(twin) == ["REQUIRES_HUMAN_APPROVAL"]


async def test_repairs_of_one_message_are_bounded(b: Bench) -> None:
    long = '{"name": "' + "x" * 5000
    answer = await handled(
        b,
        message(call("find_city", long, "1"), call("find_city", long, "2")),
        repair_arguments=True,
    )
    assert codes(answer) == ["OK", "INVALID_PARAMS"]


async def test_repair_without_installed_library_is_refused(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "json_repair", None)
    with pytest.raises(InvalidParams, match="needs the extra `repair`"):
        await handled(b, message(call("find_city", {"name": "Oslo"})), repair_arguments=True)
    assert RAN == []
    assert codes(await handled(b, message(call("find_city", {"name": "Oslo"})))) == ["OK"]


# -- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"idempotency_key": "k"}, "belongs to one call"),
        ({"max_parallel": 0}, "max_parallel"),
        ({"more": 1}, "more"),
        ({"tools": "calculator"}, "tools"),
        ({"max_length": 0}, "max_length"),
    ],
)
async def test_invalid_option_is_refused_before_anything_runs(
    b: Bench, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParams, match=words):
        await handled(b, message(call("find_city", {"name": "Oslo"})), **options)
    assert RAN == []


@pytest.mark.parametrize("wrong", [float("nan"), object(), {1: object()}, {"a": "\ud800"}])
async def test_message_not_representable_in_json_is_refused(b: Bench, wrong: Any) -> None:
    with pytest.raises(InvalidParams):
        await b.engine.handle(wrong, format="openai")
    with pytest.raises(InvalidParams, match="format"):
        await b.engine.handle(message(), format="mcp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Did you mean 'max_length'"):
        await b.engine.handle(message(), format="openai", max_lenght=1)  # type: ignore[call-arg]


async def test_tool_not_offered_to_the_model_is_refused(b: Bench) -> None:
    body = message(call("find_city", {"name": "Oslo"}, "1"), call("calculator", {}, "2"))
    assert codes(await handled(b, body, tools=["calculator"])) == [
        "TOOL_NOT_FOUND",
        "INVALID_PARAMS",
    ]
    assert codes(await handled(b, body, tools=[])) == ["TOOL_NOT_FOUND", "TOOL_NOT_FOUND"]
    assert RAN == []


# -- Agents --------------------------------------------------------------------------------------


@pytest.mark.row("T8", "P10")
async def test_agent_exports_and_calls_only_its_own_tools(b: Bench) -> None:
    agents = b.engine.agents
    await make_agent(agents, "guide", b.engine.owner.id)
    await bind(agents, "guide", ["find_city"], fixed={"limit": 7}, defaults={"name": "Oslo"})
    (exported,) = b.engine.export("openai", agent_id="guide")
    schema = exported["function"]["parameters"]
    assert schema["properties"]["name"]["type"] == ["string", "null"]
    assert "limit" not in schema["properties"]
    calls = message(
        call("find_city", {"name": None, "country": "NO"}, "1"),
        call("tell", {"length": 1}, "2"),
        call("find_city", "", "3"),  # as some models call a tool without arguments
    )
    answer = await handled(b, calls, agent_id="guide")
    assert codes(answer) == ["OK", "PERMISSION_DENIED", "OK"]
    assert answer.envelopes[0].data == {"city": "Oslo", "limit": 7}
    assert codes(await handled(b, calls, agent_id="nobody")) == ["RESOURCE_NOT_FOUND"] * 3


async def test_modifying_an_export_does_not_change_the_tools(b: Bench) -> None:
    first = b.engine.export("openai", tools=["find_city"])
    first[0]["function"]["parameters"]["properties"].clear()
    assert b.engine.export("openai", tools=["find_city"]) != first
    assert codes(await handled(b, message(call("find_city", {"nam": "Oslo"})))) == [
        "INVALID_PARAMS"
    ]
    with pytest.raises(ToolNotFound, match="nothing"):
        b.engine.export("openai", tools=["nothing"])
    with pytest.raises(InvalidParams, match="openai-responses"):
        b.engine.export("yaml")  # type: ignore[arg-type]


# -- The agent loop ------------------------------------------------------------------------------


class Script:
    """A scripted model that records its requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, messages: list[Any], *, tools: list[Any], tool_choice: Any) -> Any:
        self.asked.append({"messages": messages, "tools": tools, "choice": tool_choice})
        return self.answers.pop(0)


USER = {"role": "user", "content": "Find Oslo."}
FINAL = {"role": "assistant", "content": "It is in Norway."}


@pytest.mark.row("P10")
async def test_agent_loop_runs_until_model_calls_no_tool(b: Bench) -> None:
    llm = Script(message(call("find_city", {"name": "Oslo"})), FINAL)
    run = await b.engine.run_agent(llm, [USER], tools=["find_city"], tool_choice="required")
    assert (run.ended_by, run.turns, run.waiting) == ("answer", 2, ())
    assert [m["role"] for m in run.messages] == ["user", "assistant", "tool", "assistant"]
    assert [asked["choice"] for asked in llm.asked] == ["required", "auto"]
    assert [len(asked["tools"]) for asked in llm.asked] == [1, 1]
    assert len(llm.asked[1]["messages"]) == 3


@pytest.mark.row("P10")
async def test_agent_loop_accepts_an_asynchronous_function(b: Bench) -> None:
    script = Script(message(call("find_city", {"name": "Oslo"})), FINAL)

    async def llm(messages: list[Any], **more: Any) -> Any:
        return script(messages, **more)

    assert (await b.engine.run_agent(llm, [USER])).ended_by == "answer"


async def test_agent_loop_ends_at_max_turns_and_can_resume(b: Bench) -> None:
    endless = [message(call("find_city", {"name": "Oslo"}, str(n))) for n in range(3)]
    run = await b.engine.run_agent(Script(*endless), [USER], max_turns=3)
    assert (run.ended_by, run.turns, len(run.messages)) == ("max_turns", 3, 7)
    assert len(RAN) == 3
    again = await b.engine.run_agent(Script(FINAL), run)
    assert (again.ended_by, len(again.messages)) == ("answer", 8)
    with pytest.raises(ValueError, match="max_turns"):
        await b.engine.run_agent(Script(), [USER], max_turns=0)


async def test_message_added_to_a_run_reaches_the_model(b: Bench) -> None:
    endless = [message(call("find_city", {"name": "Oslo"}, str(n))) for n in range(2)]
    run = await b.engine.run_agent(Script(*endless), [USER], max_turns=2)
    added = {"role": "user", "content": "Answer now."}
    longer = run.model_copy(update={"messages": (*run.messages, added)})
    llm = Script(FINAL)
    again = await b.engine.run_agent(llm, longer)
    assert llm.asked[0]["messages"] == [*run.messages, added]
    assert again.messages == (*run.messages, added, FINAL)


async def test_tool_choice_none_runs_no_call(b: Bench) -> None:
    llm = Script(message(call("find_city", {"name": "Oslo"})), FINAL)
    run = await b.engine.run_agent(llm, [USER], tool_choice="none")
    assert run.messages[2]["content"].startswith("TOOL_NOT_FOUND")
    assert [asked["choice"] for asked in llm.asked] == ["none", "none"]
    assert RAN == []


@pytest.mark.parametrize("format_", ["openai-responses", "anthropic", "gemini"])
async def test_agent_loop_works_in_each_provider_format(b: Bench, format_: Any) -> None:
    arguments = {"name": "Oslo"}
    turns: dict[str, Any] = {
        "openai-responses": {
            "output": [
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "i", "name": "find_city",
                 "arguments": json.dumps(arguments)},
            ]
        },
        "anthropic": {
            "id": "m", "role": "assistant",
            "content": [{"type": "tool_use", "id": "i", "name": "find_city", "input": arguments}],
        },
        "gemini": {
            "candidates": [
                {"content": {"parts": [{"function_call": {"name": "find_city", "args": arguments}}]}}
            ]
        },
    }  # fmt: skip
    final: dict[str, Any] = {
        "openai-responses": {"output": [{"type": "message", "role": "assistant", "content": []}]},
        "anthropic": {"content": [{"type": "text", "text": "There."}]},
        "gemini": {"parts": [{"text": "There."}]},
    }
    llm = Script(turns[format_], final[format_])
    run = await b.engine.run_agent(llm, [], format=format_)
    assert (run.ended_by, len(RAN)) == ("answer", 1)
    assert "Oslo" in json.dumps(run.messages[-2])
    assert "m" not in json.dumps(run.messages[0].get("id", ""))
    assert AgentRun.model_validate_json(run.model_dump_json()) == run
    again = await b.engine.run_agent(Script(final[format_]), run)
    assert list(again.messages[: len(run.messages)]) == list(run.messages)
    cut = await b.engine.run_agent(Script(turns[format_]), [], format=format_, max_turns=1)
    longer = cut.model_copy(update={"messages": (*cut.messages, USER)})
    again = await b.engine.run_agent(Script(final[format_]), longer)
    assert again.messages[: len(longer.messages)] == longer.messages
    assert len(RAN) == 2


def test_option_beside_options_is_told_where_it_belongs() -> None:
    with pytest.raises(InvalidParams, match="session_id: It is an option: put it into `options`"):
        parse_message({"format": "openai", "message": {}, "session_id": 1})
