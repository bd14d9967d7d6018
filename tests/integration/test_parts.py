"""Tools with `streaming`: generator functions in the jail, in a worker and in the engine's process,
and services whose answers are relayed."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import psutil
import pytest

from fumehood import Config, Engine, Envelope
from fumehood.executors.parts import Parts
from fumehood.registry.secrets import RestSettings, SecretSettings
from fumehood.sandbox.host import Host
from fumehood.sandbox.settings import JailSettings
from fumehood.streams.events import Event, OutputEvent
from fumehood.testing import FakeWall
from support.answers import code_of, error_of
from support.part_tools import KEY, TOOLS, forging
from support.processes import is_gone
from support.wait import wait_until
from upstream import Reply, Upstream

pytestmark = [pytest.mark.anyio, pytest.mark.needs("landlock"), pytest.mark.row("T3")]

FUNCTIONS = [tool.definition.name for tool in TOOLS]
SECRET = 's3cret"Value/1'
STREAM_KB = 256
OUTPUT_KB = 128
"""Output limit far below the default, so that endless output ends sooner, in KB."""
SSE = "text/event-stream"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """A secret, immediate retries, and a small output limit for host functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY", SECRET)
        patch.setattr("fumehood.pipeline.retry.BASE_S", 0)
        patch.setattr(Host, "limits", replace(Host.limits, output_bytes=OUTPUT_KB * 1024))
        yield


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """One shared engine; runs must not affect each other."""
    config = Config(home=tmp_path_factory.mktemp("home"), jail=JailSettings(output_kb=OUTPUT_KB))
    async with Engine(tools=[*TOOLS, forging], config=config) as running:
        yield running


@pytest.fixture
async def relaying(home: Path, upstream: Upstream) -> AsyncIterator[Engine]:
    document = {
        "name": "relay",
        "type": "REST",
        "description": "Ask the service, which answers in parts.",
        "method": "GET",
        "endpoint": f"{upstream.url}/now",
        "headers": {"authorization": "Bearer ${secret:key}"},
        "streaming": True,
        "idempotent": True,
        "retry_count": 2,
        "parameters": {"properties": {"city": {"type": "string"}}},
    }
    config = Config(
        home=home,
        rest=RestSettings(allowed_hosts=("127.0.0.1",), stream_kb=STREAM_KB),
        secrets={"key": SecretSettings(env="KEY", tools=("relay",), hosts=("127.0.0.1",))},
    )
    async with Engine(tools=[document], config=config, interpreter=FakeWall()) as running:
        yield running


async def follow(engine: Engine, tool: str, arguments: Any, **options: Any) -> list[Event]:
    return [event async for event in engine.stream(tool, arguments, **options)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, OutputEvent))


def answer_of(events: list[Event]) -> Envelope:
    envelope: Envelope = events[-1].envelope  # type: ignore[union-attr]
    return envelope


@pytest.mark.row("S8", "D2")
@pytest.mark.parametrize("tool", FUNCTIONS)
async def test_part_is_streamed_while_the_function_still_runs(engine: Engine, tool: str) -> None:
    """The function runs for an hour, so its first part must arrive before its end."""
    events: AsyncIterator[Event] = engine.stream(tool, {"kind": "slow"})
    async for event in events:
        if isinstance(event, OutputEvent):
            process = psutil.Process(int(event.text))
            await engine.cancel(event.metadata.call_id)
    assert answer_of([event]).error.code == "CANCELLED"  # type: ignore[union-attr]
    if tool != "awaited":
        await anyio.to_thread.run_sync(wait_until, lambda: is_gone(process))


@pytest.mark.row("D2")
@pytest.mark.parametrize("tool", FUNCTIONS)
async def test_streamed_result_is_the_joined_text_or_the_list_of_parts(
    engine: Engine, tool: str
) -> None:
    for kind, data, text in (
        ("text", "one two drei ä€🙂", "one two drei ä€🙂"),
        ("values", [{"n": 1}, "two", [3, None]], '{"n":1}\ntwo[3,null]\n'),
        ("nothing", "", ""),
        ("many", "x" * 20_000, "x" * 20_000),
    ):
        events = await follow(engine, tool, {"kind": kind})
        shown = answer_of(events).data
        if kind == "many":
            assert shown["truncation_info"]["original_length"] == len(data)
        else:
            assert shown == {"value": data}
        assert text_of(events) == text
        assert (await engine.call(tool, {"kind": kind})).data.keys() == shown.keys()
        assert len(events) < 5000  # small parts that come at once share an event


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("tool", "is_followed"),
    [("jailed", True), ("worked", True), ("awaited", True), ("awaited", False)],
)
async def test_endless_generator_is_ended_by_output_or_time_limit(
    engine: Engine, tool: str, is_followed: bool
) -> None:
    async def end(kind: str, **options: Any) -> tuple[str, list[Event]]:
        events: list[Event] = []
        if is_followed:
            events = await follow(engine, tool, {"kind": kind}, **options)
            answer = answer_of(events)
        else:
            answer = await engine.call(tool, {"kind": kind}, **options)
        return code_of(answer), events

    code, events = await end("endless")
    assert code == "OUTPUT_LIMIT_EXCEEDED"
    assert len(text_of(events)) <= OUTPUT_KB * 1024
    if is_followed and tool.startswith("jailed"):  # twin: a worker is used again
        pid = int(text_of(events).partition("\n")[0])
        await anyio.to_thread.run_sync(wait_until, lambda: not psutil.pid_exists(pid))
    assert (await end("tiny"))[0] == "OUTPUT_LIMIT_EXCEEDED"
    assert (await end("slow", timeout_seconds=0.5))[0] == "TIMEOUT"
    assert (await engine.call(tool, {"kind": "text"})).success


@pytest.mark.row("S4")
async def test_control_uncounted_parts_let_only_the_time_limit_end_the_generator(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncounted(max_bytes: int, *more: Any) -> Parts:
        return Parts(max_bytes << 20, *more)

    monkeypatch.setattr("fumehood.executors.function.Parts", uncounted)
    answer = await engine.call("awaited", {"kind": "endless"}, timeout_seconds=0.5)
    assert code_of(answer) == "TIMEOUT"


@pytest.mark.row("E8")
@pytest.mark.parametrize("tool", FUNCTIONS)
async def test_secret_yielded_character_by_character_is_redacted(engine: Engine, tool: str) -> None:
    events = await follow(engine, tool, {"kind": "key"})
    assert text_of(events) == "[redacted] and more"
    assert answer_of(events).data == {"value": "[redacted] and more"}
    assert answer_of(events).metadata.redacted == 1
    assert KEY[:8] not in repr(events)


@pytest.mark.row("P6")
@pytest.mark.parametrize("tool", ["worked", "awaited"])
async def test_failed_attempt_is_not_retried_after_a_part_was_streamed(
    engine: Engine, tool: str
) -> None:
    events = await follow(engine, tool, {"kind": "refuses"})
    assert text_of(events) == "before "
    answer = answer_of(events)
    assert (answer.error.code, answer.error.retryable) == ("BANK_BUSY", True)  # type: ignore[union-attr]
    assert answer.metadata.retry_count == 0
    for options in ({"enable_streaming": False}, {}):  # twins: nobody has seen a part
        if options:
            answer = answer_of(await follow(engine, tool, {"kind": "refuses"}, **options))
        else:
            answer = await engine.call(tool, {"kind": "refuses"})
        assert answer.metadata.retry_count == 2


@pytest.mark.parametrize("tool", FUNCTIONS)
async def test_non_json_part_and_returned_value_are_errors(engine: Engine, tool: str) -> None:
    unfit = await engine.call(tool, {"kind": "unfit"})
    assert "cannot be represented in JSON" in error_of(unfit).message
    if tool in ("jailed", "worked"):
        returned = await engine.call(tool, {"kind": "returns"})
        assert code_of(returned) == "EXECUTION_ERROR"


@pytest.mark.row("S1")
async def test_forged_parts_are_redacted_bounded_and_never_become_the_result(
    engine: Engine,
) -> None:
    forged = json.dumps(f"{KEY} ")
    events = await follow(engine, "forging", {"count": 3, "text": forged})
    assert text_of(events) == "[redacted] " * 3 + "honest"
    assert answer_of(events).data == {"value": "honest"}
    events = await follow(engine, "forging", {"count": 10**9, "text": '"' + "x" * 900 + '"'})
    assert answer_of(events).error.code == "OUTPUT_LIMIT_EXCEEDED"  # type: ignore[union-attr]
    assert len(text_of(events)) <= OUTPUT_KB * 1024
    events = await follow(engine, "forging", {"count": 10**9, "text": '""'})
    assert answer_of(events).error.code == "OUTPUT_LIMIT_EXCEEDED"  # type: ignore[union-attr]
    for text in ("5", '{"a": 1}', '"\\ud800"'):
        answer = answer_of(await follow(engine, "forging", {"count": 1, "text": text}))
        assert not answer.success
    assert (await engine.call("jailed", {"kind": "text"})).success


# -- services ------------------------------------------------------------------------------


@pytest.mark.row("T5", "S8", "D2")
async def test_service_answer_is_relayed_while_it_arrives(
    relaying: Engine, upstream: Upstream
) -> None:
    body = "data: begin\n\ndata: ä\n\n".encode()
    upstream.script("/now", Reply(body=body, content_type=SSE, held_after=20))
    seen = ""
    async for event in relaying.stream("relay"):
        if isinstance(event, OutputEvent):
            seen += event.text
            upstream.release()  # it has sent a line, half a character, and waits
    assert seen == body.decode()
    assert answer_of([event]).data == {"text": body.decode(), "content_type": SSE}


async def test_relayed_answer_loses_its_byte_order_mark_in_any_pieces(
    relaying: Engine, upstream: Upstream
) -> None:
    marked = "\ufeffdata: \ufeff\n\n"  # only the first one is a mark
    upstream.script("/now", Reply(body=marked.encode(), content_type=SSE, drip_s=0.0))
    events = await follow(relaying, "relay", {})
    assert text_of(events) == answer_of(events).data["text"] == marked[1:]


@pytest.mark.row("T5", "E6")
@pytest.mark.parametrize("is_packed", [True, False])
async def test_relayed_answer_up_to_its_limit_is_kept_as_a_blob_and_a_longer_one_fails(
    relaying: Engine, upstream: Upstream, is_packed: bool
) -> None:
    def reply(size: int) -> Reply:
        lines = b"".join(b'{"n": %d}\n' % n for n in range(size // 8))[:size]
        headers = {"content-encoding": "gzip"} if is_packed else {}
        return Reply(
            body=gzip.compress(lines) if is_packed else lines,
            content_type="application/jsonl", headers=headers,
        )  # fmt: skip

    most = STREAM_KB * 1024
    upstream.script("/now", reply(most), reply(most + 1))
    events = await follow(relaying, "relay", {})
    answer = answer_of(events)
    assert answer.error is None
    assert answer.data["text"].startswith('{"n": 0}\n')
    assert answer.data["truncation_info"]["original_length"] == most == len(text_of(events))
    assert answer.data["resource_url"]
    assert answer.metadata.resources.output_bytes == most
    failed = answer_of(await follow(relaying, "relay", {})).error
    assert failed.code == "OUTPUT_LIMIT_EXCEEDED"
    assert failed.details["text"].startswith('{"n": 0}\n')


@pytest.mark.row("S4", "T5")
async def test_endless_relayed_answer_is_ended_and_its_connection_closed(
    relaying: Engine, upstream: Upstream
) -> None:
    upstream.script("/now", Reply(body=b"data: x\n\n", content_type=SSE, endless=True))
    events = await follow(relaying, "relay", {})
    assert answer_of(events).error.code == "OUTPUT_LIMIT_EXCEEDED"  # type: ignore[union-attr]
    assert len(text_of(events)) <= STREAM_KB * 1024
    held = Reply(body=b"data: 1\n\ndata: 2\n\n", content_type=SSE, held_after=9)
    upstream.script("/now", held)
    events = await follow(relaying, "relay", {}, timeout_seconds=0.5, enable_retry=False)
    error = answer_of(events).error
    assert error.code == "TIMEOUT"
    assert error.details["text"] == "data: 1\n\n" == text_of(events)
    async for event in relaying.stream("relay"):
        if isinstance(event, OutputEvent):
            await relaying.cancel(event.metadata.call_id)
    error = answer_of([event]).error
    assert error.code == "CANCELLED"
    assert error.details["text"] == "data: 1\n\n"
    await anyio.to_thread.run_sync(upstream.wait_for, lambda: upstream.closed == 3)


@pytest.mark.row("P6", "T5")
async def test_broken_relayed_answer_is_retried_only_if_no_part_was_streamed(
    relaying: Engine, upstream: Upstream
) -> None:
    broken = Reply(body=b"data: 1\n\ndata: 2\n\n", content_type=SSE, reset_after=9)
    whole = Reply(body=b"data: 1\n\ndata: 2\n\n", content_type=SSE)
    upstream.script("/now", Reply(503), broken, whole)
    events = await follow(relaying, "relay", {})
    kinds = [event.type for event in events]
    assert kinds == ["tool_progress", "tool_retrying", "tool_output", "tool_error"]
    error = answer_of(events).error
    assert (error.code, error.retryable) == ("NETWORK_ERROR", True)
    assert upstream.count("/now") == 2
    upstream.script("/now", broken, whole)  # twin
    answer = await relaying.call("relay")
    assert answer.data == {"text": "data: 1\n\ndata: 2\n\n", "content_type": SSE}
    assert answer.metadata.retry_count == 1


@pytest.mark.row("E8", "T5")
async def test_request_secret_is_redacted_in_the_relayed_stream_and_result(
    relaying: Engine, upstream: Upstream
) -> None:
    echoed = json.dumps({"a": SECRET, "b": SECRET[:-1]}).encode() + SECRET.encode()
    upstream.script("/now", Reply(body=echoed, content_type="text/plain", drip_s=0.0))
    events = await follow(relaying, "relay", {})
    shown = json.dumps({"a": "[redacted]", "b": SECRET[:-1]}) + "[redacted]"
    assert text_of(events) == shown
    assert answer_of(events).data["text"] == shown
    assert answer_of(events).metadata.redacted == 2
