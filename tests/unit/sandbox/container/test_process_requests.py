"""Requests about registered processes, whose guest is hostile."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from fumehood.core.errors import (
    MAX_MESSAGE_CHARACTERS,
    InvalidParams,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.protocol.framing import MAX_REQUEST_BYTES
from fumehood.sandbox.container import channel
from fumehood.sandbox.container.channel import MAX_OPEN
from fumehood.sandbox.wall import MAX_FRAME_BYTES
from support.scripted_guest import ScriptedGuest

pytestmark = pytest.mark.anyio

SHOWN = {
    "name": "web", "state": "running", "exit_code": None, "signal": None, "lost": False,
    "started_at": 1.5,
}  # fmt: skip


def answer(number: int = 1, running: int = 1, **parts: Any) -> dict[str, Any]:
    return {"op": "process", "id": number, "running": running, **(parts or {"process": SHOWN})}


@pytest.fixture
async def guest() -> ScriptedGuest:
    guest = ScriptedGuest()
    guest.channel.keep(1, 60)
    return guest


async def asked(guest: ScriptedGuest, **request: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(guest.channel.processes.ask(request))
    await anyio.wait_all_tasks_blocked()
    return task


async def test_answer_reaches_the_one_who_asked_and_tells_how_many_run(
    guest: ScriptedGuest,
) -> None:
    listing = await asked(guest, do="list")
    starting = await asked(guest, do="start", name="web", argv=["sleep", "9"])
    guest.says(answer(2, 1))
    assert await starting == {"process": SHOWN}
    assert guest.channel.processes.running == 1
    guest.says(answer(1, 1, processes=[SHOWN]))
    assert await listing == {"processes": [SHOWN]}
    guest.says({"op": "processes", "running": 0})
    assert guest.channel.processes.running == 0
    assert not guest.channel.is_dead


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", InvalidParams),
        ("not_found", ResourceNotFound),
        ("unavailable", SandboxUnavailable),
    ],
)
async def test_fault_is_an_error_without_control_characters(
    guest: ScriptedGuest, kind: str, error: type[Exception]
) -> None:
    reading = await asked(guest, do="read", name="web", after=0)
    guest.says(answer(fault={"kind": kind, "message": "no\x1b[31m such"}))
    with pytest.raises(error, match=r"no\[31m such"):
        await reading


OUTPUT = {"text": "", "offset": 0, "skipped": 0, "ended": True}

ANSWERS: dict[str, dict[str, Any]] = {
    "list": {"processes": [SHOWN]},
    "start": {"process": SHOWN},
    "read": {"output": OUTPUT},
    "write": {"process": SHOWN},
    "stop": {"process": SHOWN},
}
"""What a request does → what its answer has."""


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("do", ANSWERS)
async def test_answer_to_another_kind_of_request_ends_the_channel(
    guest: ScriptedGuest, do: str, answered: str
) -> None:
    """The twins are the answers of the right kind, and a refusal, which every request can get."""
    asking = await asked(guest, do=do, name="web")
    guest.says(answer(**ANSWERS[answered]))
    if ANSWERS[answered] == ANSWERS[do]:
        assert await asking == ANSWERS[do]
        refused = await asked(guest, do=do, name="web")
        guest.says(answer(2, fault={"kind": "invalid", "message": "no"}))
        with pytest.raises(InvalidParams):
            await refused
    else:
        with pytest.raises(SandboxUnavailable):
            await asking
    assert guest.channel.is_dead is (ANSWERS[answered] != ANSWERS[do])


@pytest.mark.parametrize("do", ["start", "write", "stop"])
async def test_answer_about_another_process_ends_the_channel(guest: ScriptedGuest, do: str) -> None:
    asking = await asked(guest, do=do, name="other")
    guest.says(answer(process=SHOWN))
    with pytest.raises(SandboxUnavailable):
        await asking
    assert guest.channel.is_dead


async def test_second_answer_to_a_request_ends_the_channel(guest: ScriptedGuest) -> None:
    asking = await asked(guest, do="list")
    guest.says(answer(processes=[]))
    assert await asking == {"processes": []}
    assert not guest.channel.is_dead
    guest.says(answer(processes=[]))
    assert guest.channel.is_dead


async def test_answer_is_not_longer_than_a_frame_and_its_message_is_cut(
    guest: ScriptedGuest,
) -> None:
    asking = await asked(guest, do="list")
    message = "word " * (MAX_FRAME_BYTES // 6)
    guest.says(answer(fault={"kind": "invalid", "message": message}))
    with pytest.raises(InvalidParams) as caught:
        await asking
    assert len(caught.value.message) <= MAX_MESSAGE_CHARACTERS
    asking = await asked(guest, do="list")
    guest.says(answer(2, fault={"kind": "invalid", "message": message * 2}))
    assert guest.channel.is_dead
    with pytest.raises(SandboxUnavailable):
        await asking


@pytest.mark.parametrize(
    "frame",
    [
        answer(7),
        answer(running=17),
        answer(process=SHOWN, output={"text": "", "offset": 0, "skipped": 0, "ended": True}),
        answer(process={**SHOWN, "name": "A"}),
        answer(process={**SHOWN, "exit_code": 256}),
        answer(process={**SHOWN, "started_at": 1e300}),
        answer(process={**SHOWN, "pid": 1}),
        answer(processes=[SHOWN] * 33),
        answer(output={"text": "x" * 65537, "offset": 0, "skipped": 0, "ended": True}),
        answer(output={**OUTPUT, "offset": -1}),
        answer(output={**OUTPUT, "offset": 1 << 53}),
        answer(output={**OUTPUT, "skipped": 1 << 53}),
        answer(fault={"kind": "fatal", "message": ""}),
        {"op": "processes", "running": -1},
    ],
)
async def test_wrong_answer_ends_the_channel(guest: ScriptedGuest, frame: dict[str, Any]) -> None:
    do = next((do for do, parts in ANSWERS.items() if parts.keys() <= frame.keys()), "list")
    asking = await asked(guest, do=do, name="web")
    guest.says(frame)
    assert guest.channel.is_dead
    with pytest.raises(SandboxUnavailable):
        await asking


async def test_count_that_does_not_fall_ends_the_channel(guest: ScriptedGuest) -> None:
    guest.says({"op": "processes", "running": 3}, {"op": "processes", "running": 2})
    assert not guest.channel.is_dead
    guest.says({"op": "processes", "running": 2})
    assert guest.channel.is_dead


async def test_container_without_a_session_tells_nothing_of_processes() -> None:
    guest = ScriptedGuest()
    guest.says({"op": "processes", "running": 0})
    assert guest.channel.is_dead


async def test_unanswered_request_fails_in_time_and_its_late_answer_is_dropped(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "ANSWER_S", 0.01)
    with pytest.raises(SandboxUnavailable, match="in time"):
        await guest.channel.processes.ask({"do": "list"})
    guest.says(answer(processes=[]))
    assert not guest.channel.is_dead


async def test_guest_that_never_answers_has_a_bounded_number_of_requests(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that their callers gave up count as well, and the guest gets no further ones."""
    monkeypatch.setattr(channel, "ANSWER_S", 0.0)
    for _ in range(MAX_OPEN):
        with pytest.raises(SandboxUnavailable, match="in time"):
            await guest.channel.processes.ask({"do": "list"})
    sent = len(guest.wire.messages)
    for _ in range(3):
        with pytest.raises(SandboxUnavailable, match="Too many"):
            await guest.channel.processes.ask({"do": "list"})
    assert len(guest.wire.messages) == sent
    guest.says(answer(1, processes=[]))  # the twin: one that is only late
    monkeypatch.undo()
    asking = await asked(guest, do="list")
    guest.says(answer(MAX_OPEN + 1, processes=[]))
    assert await asking == {"processes": []}


async def test_number_of_open_requests_is_bounded(guest: ScriptedGuest) -> None:
    tasks = [await asked(guest, do="list") for _ in range(MAX_OPEN)]
    with pytest.raises(SandboxUnavailable, match="Too many"):
        await guest.channel.processes.ask({"do": "list"})
    guest.channel.end("it is over")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in results} == {SandboxUnavailable}


async def test_request_that_is_too_long_is_never_sent(guest: ScriptedGuest) -> None:
    sent = len(guest.wire.messages)
    with pytest.raises(InvalidParams, match="too long"):
        await guest.channel.processes.ask({"do": "start", "command": "x" * MAX_REQUEST_BYTES})
    assert len(guest.wire.messages) == sent


async def test_request_cannot_choose_another_message(guest: ScriptedGuest) -> None:
    task = await asked(guest, do="list", op="run", id=7)
    assert guest.wire.messages[-1] == {"op": "process", "id": 1, "do": "list"}
    guest.channel.end("it is over")
    with pytest.raises(SandboxUnavailable):
        await task
