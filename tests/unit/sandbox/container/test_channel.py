"""One container's channel: the protocol's order, its deadlines, and a guest that lies."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from fumehood.core.errors import (
    MAX_MESSAGE_CHARACTERS,
    EndedBy,
    InternalError,
    SandboxUnavailable,
)
from fumehood.core.limits import Grade, Limit, Limits
from fumehood.docker.streams import DockerStreams
from fumehood.protocol import framing
from fumehood.protocol.container_frames import PART_CHARACTERS
from fumehood.protocol.framing import FrameError
from fumehood.protocol.streams import NO_RUN, StreamFrame
from fumehood.sandbox.container.channel import (
    USUAL_CLOCKS,
    Channel,
    Clocks,
    needs_preloaded,
)
from fumehood.sandbox.container.container import Container, ContainerFailed
from fumehood.sandbox.container.supply import ProgramStreams
from fumehood.sandbox.streams import MAX_UNREAD_BYTES, Stream, StreamKind, StreamPort
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks
from support.fake_docker import record
from support.scripted_guest import LIMITS, READY, SHORT_CLOCKS, ScriptedGuest, Wire, ended, reset

pytestmark = pytest.mark.anyio

QUICK = Limits(wall_s=0.01, cpu_s=0.01, memory_mb=128, output_bytes=1000)


def output(text: str = "x", run_id: int = 1) -> dict[str, Any]:
    return {"op": "output", "id": run_id, "stream": "stdout", "text": text}


def file(path: str = "a", size: int = 1) -> dict[str, Any]:
    return {"op": "file", "id": 1, "path": path, "size": size}


def data(content: bytes = b"x") -> dict[str, Any]:
    return {"op": "data", "id": 1, "data": base64.b64encode(content).decode()}


async def begun(
    guest: ScriptedGuest | None = None, limits: Limits = LIMITS, sinks: RunSinks = NO_SINKS
) -> tuple[ScriptedGuest, asyncio.Task[RunEnding]]:
    """A guest, new unless it is given, and a run that has been sent to it."""
    guest = guest or ScriptedGuest()
    task = asyncio.ensure_future(guest.channel.run("python", {"code": "1"}, limits, sinks, "call"))
    await asyncio.sleep(0)
    assert [message["op"] for message in guest.wire.messages][-1:] == ["run"]
    return guest, task


async def test_next_run_waits_for_the_guest_to_be_reset() -> None:
    guest, task = await begun()
    guest.says(output("hi\n"), file(), data(), ended())
    ending = await task
    assert (ending.ended_by, ending.result, ending.stdout) == (EndedBy.OK, {"value": 4}, "hi\n")
    assert guest.channel.is_resetting
    assert not guest.channel.is_free
    with pytest.raises(InternalError):
        await guest.channel.run("python", {}, LIMITS, NO_SINKS, "call")
    guest.says(reset())
    assert guest.channel.is_free
    assert guest.heard.clean == 1
    _, again = await begun(guest)
    assert guest.wire.messages[-1]["id"] == 2
    guest.says(ended(2), reset(2))
    assert (await again).ended_by is EndedBy.OK
    assert guest.heard.ends == []


BEFORE_ANY_RUN = {
    "ready-twice": READY,
    "ending-of-nothing": ended(),
    "reset-of-nothing": reset(),
    "output-of-nothing": output(),
    "unknown-kind": {"op": "exec", "id": 1},
    "no-kind": {"id": 1},
    "progress": {"op": "progress", "id": 1, "percent": 1.0, "message": ""},
}


@pytest.mark.parametrize("name", BEFORE_ANY_RUN)
async def test_unsolicited_message_before_any_run_ends_the_container(name: str) -> None:
    guest = ScriptedGuest()
    guest.says(BEFORE_ANY_RUN[name])
    assert guest.channel.dead.is_set()
    assert guest.wire.is_aborted
    assert len(guest.heard.ends) == 1


DURING_A_RUN: dict[str, list[dict[str, Any]]] = {
    "another-run's-output": [output(run_id=2)],
    "another-run's-ending": [ended(2)],
    "reset-before-the-ending": [reset()],
    "data-without-a-file": [data()],
    "data-beyond-the-file": [file(size=1), data(b"xy")],
    "data-without-a-byte": [file(size=1), data(b"")],
    "path-upwards": [file("../../etc/passwd")],
    "absolute-path": [file("/etc/passwd")],
    "path-with-nul": [file("a\0b")],
    "negative-size": [file(size=-1)],
    "size-of-a-terabyte": [file(size=1 << 40)],
    "not-base64": [file(size=9), {"op": "data", "id": 1, "data": "!!!!"}],
    "ready-again": [READY],
    "unknown-ending": [ended(ended_by="won")],
    "unknown-limit": [ended(limits_hit=["time"])],
    "negative-figure": [ended(stdout_bytes=-1)],
    "extra-field": [ended(score=1)],
    "text-as-number": [ended(exit_code="0")],
    "unknown-stream": [{**output(), "stream": "stdin"}],
}


@pytest.mark.row("B3")
@pytest.mark.parametrize("name", DURING_A_RUN)
async def test_invalid_message_during_a_run_loses_the_run_and_the_container(name: str) -> None:
    guest, task = await begun()
    guest.says(*DURING_A_RUN[name])
    assert (await task).ended_by is EndedBy.SANDBOX_LOST
    assert guest.heard.ends[0].startswith("it sent what it must not")


AFTER_THE_ENDING: dict[str, dict[str, Any]] = {
    "second-ending": ended(),
    "output": output(),
    "file": file(),
    "data": data(),
    "ready": READY,
    "another-run's-reset": reset(2),
}


@pytest.mark.parametrize("name", AFTER_THE_ENDING)
async def test_invalid_message_after_the_ending_keeps_the_answer_and_ends_the_container(
    name: str,
) -> None:
    guest, task = await begun()
    guest.says(ended(), AFTER_THE_ENDING[name])
    assert (await task).ended_by is EndedBy.OK
    assert guest.channel.dead.is_set()


RAW = {
    "huge-frame": b"\xff\xff\xff\xff",
    "not-json": framing.HEADER.pack(3) + b"abc",
    "not-an-object": framing.HEADER.pack(2) + b"[]",
    "deep-json": framing.HEADER.pack(400) + b"[" * 400,
    "nan": framing.HEADER.pack(9) + b'{"a":NaN}',
    "not-a-frame": b"HTTP/1.1 200 OK\r\n\r\n",
    "right-frame-after-a-wrong-one": framing.encode({"op": "exec"}) + framing.encode(ended()),
}


async def test_broken_framing_of_the_runtime_loses_the_run_and_ends_the_container() -> None:
    guest, task = await begun()
    guest.channel.stream_broken("no record")
    assert (await task).ended_by is EndedBy.SANDBOX_LOST
    assert guest.channel.why == "it sent what it must not: no record"


@pytest.mark.parametrize("name", RAW)
async def test_malformed_frame_loses_the_run_and_ends_the_container(name: str) -> None:
    guest, task = await begun()
    guest.channel.data_received(RAW[name])
    assert (await task).ended_by is EndedBy.SANDBOX_LOST
    assert guest.channel.dead.is_set()


async def test_guest_stderr_is_kept_for_the_log_up_to_a_cap() -> None:
    guest, task = await begun()
    for _ in range(100):
        guest.channel.errors_received(b"x" * 100)
    assert not task.done()
    assert len(guest.channel.complaint) == MAX_MESSAGE_CHARACTERS
    guest.says(ended())
    assert (await task).ended_by is EndedBy.OK


async def test_guest_that_misses_its_deadline_is_ended_and_the_run_times_out() -> None:
    guest, task = await begun(ScriptedGuest(SHORT_CLOCKS), QUICK)
    guest.says(output("so far"))
    ending = await task
    assert (ending.ended_by, ending.stdout) == (EndedBy.WALL_TIME, "so far")
    assert guest.channel.dead.is_set()


async def test_guest_that_never_finishes_sending_files_loses_the_run() -> None:
    guest, task = await begun(ScriptedGuest(replace(SHORT_CLOCKS, answer_grace_s=60)), QUICK)
    guest.says(file(size=100), data())
    assert (await task).ended_by is EndedBy.SANDBOX_LOST
    assert guest.channel.dead.is_set()


async def test_each_frame_of_a_runs_files_gives_a_slow_guest_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[float] = []
    expect_by = Channel._expect_by

    def noted(channel: Channel, seconds: float, late: Callable[[], None]) -> None:
        deadlines.append(seconds)
        expect_by(channel, seconds, late)

    guest, task = await begun()
    monkeypatch.setattr(Channel, "_expect_by", noted)
    guest.says(file(size=3), data(), data(), data(), ended())
    await task
    assert deadlines == [USUAL_CLOCKS.collect_s] * 4 + [USUAL_CLOCKS.reset_s]


async def test_attack_guest_that_draws_out_its_files_frame_by_frame_is_ended() -> None:
    guest, task = await begun(ScriptedGuest(Clocks(collect_most_s=0.0)))
    guest.says(file(size=1000), data())
    with anyio.fail_after(120):
        ending = await task
    assert ending.ended_by is EndedBy.SANDBOX_LOST
    assert guest.channel.dead.is_set()


async def test_guest_that_does_not_reset_in_time_is_ended_as_dirty() -> None:
    guest, task = await begun(ScriptedGuest(SHORT_CLOCKS))
    guest.says(ended())
    await task
    with anyio.fail_after(120):
        await guest.channel.dead.wait()
    assert guest.channel.is_dirty


async def test_guest_that_reports_an_incomplete_reset_is_ended_as_dirty() -> None:
    guest, task = await begun()
    guest.says(ended(), reset(clean=False, why="a file is left"))
    assert (await task).ended_by is EndedBy.OK
    assert guest.channel.is_dirty
    assert guest.heard.ends == ["it is not clean: a file is left"]


@pytest.mark.row("S8", "P8")
@pytest.mark.parametrize("how", ["ended", "at_once", "silent", "dead"])
async def test_cancelled_run_reports_its_ending_before_it_raises(how: str) -> None:
    """Also where the guest had ended it in the same moment, or says nothing any more."""
    guest = ScriptedGuest(SHORT_CLOCKS)
    told: list[RunEnding] = []
    printed: list[str] = []
    sinks = RunSinks(ending=told.append, output=lambda stream, text: printed.append(text))
    _, task = await begun(guest, sinks=sinks)
    guest.says(output("so far"))
    if how == "at_once":
        guest.says(ended())
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if how == "ended":
        guest.says(output(", and more"), ended(ended_by="cancelled"), reset())
    if how == "dead":
        guest.channel.connection_lost(None)
    with pytest.raises(asyncio.CancelledError):
        await task
    (ending,) = told
    assert ending.ended_by is (EndedBy.OK if how == "at_once" else EndedBy.CANCELLED)
    assert "".join(printed).startswith("so far")
    assert ("".join(printed) == "so far, and more") is (how == "ended")
    assert guest.channel.dead.is_set() is (how in ("silent", "dead"))


# -- the choice between two processes ------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "",
        "1 + 1",
        "import json",
        "import os.path, json as j; from collections import deque",
        "from __future__ import annotations\nimport sys  # for its version\n",
        "if True:\n    import math\n",
        "import re\nre.compile('x')",
        "important = 1\nfrom_here = important",
    ],
)
def test_program_with_only_standard_imports_needs_no_preloaded_modules(code: str) -> None:
    assert not needs_preloaded(code)


@pytest.mark.parametrize(
    "code",
    [
        "import pandas",
        "import json, numpy as np",
        "import json; import pandas",
        "def f():\n    from pandas import DataFrame",
        "from matplotlib.pyplot import plot",
        "from . import json",
        "import helper",
        "import \\\n    pandas",
        "import\tpandas",
        "from\\\n pandas import DataFrame",
        "import ｐandas",
        "__import__('pan' + 'das')",
        "import importlib",
        'exec("imp" + "ort pandas")',
        "eval('1')",
        "compile('1', '', 'eval')",
        "getattr(__builtins__, '__imp' + 'ort__')('pandas')",
        "import sys\nsys.modules",
        "from sys import modules",
        "import pickle\npickle.load(open('table', 'rb'))",
        "import runpy",
        "x = 1\n" * PART_CHARACTERS,
        "from\x0cpandas import x",
    ],
)
def test_program_with_unclear_imports_gets_preloaded_modules(code: str) -> None:
    assert needs_preloaded(code)


@pytest.mark.parametrize(
    ("code", "needs"),
    [
        ("import " * 9000, True),
        ("import " + " " * 60_000, True),
        ("from " * 12_000, False),
        ("from " + "a" * 60_000, False),
    ],
)
def test_imports_of_a_hostile_text_are_searched_in_linear_time(code: str, needs: bool) -> None:
    assert needs_preloaded(code) == needs


# -- streams ---------------------------------------------------------------------------------


class End:
    """The host's end of a stream. A frame `no` is refused; the port is kept."""

    def __init__(self, port: StreamPort) -> None:
        self.port = port
        self.frames: list[bytes] = []
        self.is_closed = False
        self.interrupted = 0

    def on_frame(self, body: bytes) -> None:
        if body == b"no":
            raise FrameError("no")
        if not self.is_closed:
            self.frames.append(body)

    def close(self) -> None:
        self.is_closed = True

    def interrupt(self) -> None:
        self.interrupted += 1


async def streaming(
    guest: ScriptedGuest, limits: Limits = LIMITS
) -> tuple[asyncio.Task[RunEnding], End]:
    """A run with a stream, and the stream's end."""
    opened: list[End] = []

    def open_(port: StreamPort) -> End:
        opened.append(End(port))
        return opened[-1]

    _, task = await begun(
        guest, limits, RunSinks(streams=(Stream(StreamKind("network", "pem"), open_),))
    )
    return task, opened[0]


async def test_frames_of_a_stream_pass_both_ways_until_its_run_ends() -> None:
    guest = ScriptedGuest()
    task, end = await streaming(guest)
    assert guest.wire.messages[-1]["streams"] == {"network": "pem"}
    guest.says_in("network", b"in")
    end.port.send(b"out")
    assert (end.frames, guest.wire.frames) == ([b"in"], [StreamFrame("network", 1, b"out")])
    guest.says(ended())
    await task
    assert end.is_closed
    before = len(guest.wire.messages)
    end.port.send(b"late")
    end.port.pause(is_paused=True)
    end.port.refuse("late")
    assert (len(guest.wire.frames), len(guest.wire.messages)) == (1, before)
    assert not guest.channel.is_dead


BAD_FRAMES: dict[str, Callable[[ScriptedGuest], None]] = {
    "refused-by-its-owner": lambda guest: guest.says_in("network", b"no"),
    "another-run": lambda guest: guest.says_in("network", b"x", run_id=2),
    "no-run": lambda guest: guest.says_in("network", b"x", NO_RUN),
    "known-kind-that-is-not-open": lambda guest: guest.says_in("calls", b"x"),
    "kind-of-the-container-in-a-run": lambda guest: guest.says_in("ports", b"x"),
    "unknown-kind": lambda guest: guest.says_in("exec", b"x"),
    "while-files-come": lambda guest: (guest.says(file()), guest.says_in("network", b"x"))[1],
    "after-the-ending": lambda guest: (guest.says(ended()), guest.says_in("network", b"x"))[1],
    "without-a-kind": lambda guest: guest.sends(framing.HEADER.pack(6) + b"\0\0\0\0\0\1"),
    "half-a-head": lambda guest: guest.sends(framing.HEADER.pack(3) + b"\0\7\0"),
    "half-a-kind": lambda guest: guest.sends(framing.HEADER.pack(9) + b"\0\7\0\0\0\1net"),
    "kind-beyond-ascii": lambda guest: guest.sends(
        framing.HEADER.pack(8) + b"\0\2\0\0\0\1" + "é".encode()
    ),
}


@pytest.mark.row("B3")
@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_attack_invalid_frame_of_a_stream_ends_the_container(name: str) -> None:
    guest = ScriptedGuest()
    task, end = await streaming(guest)
    BAD_FRAMES[name](guest)
    ending = await task
    assert (ending.ended_by is EndedBy.OK) == (name == "after-the-ending")
    assert guest.heard.ends[0].startswith("it sent what it must not")
    assert end.is_closed
    assert end.frames == []


async def test_attack_frame_of_a_stream_without_any_run_ends_the_container() -> None:
    for run_id in (NO_RUN, 1):
        guest = ScriptedGuest()
        guest.says_in("ports", b"x", run_id)
        assert guest.channel.is_dead


async def test_end_that_finds_a_fault_later_ends_the_container() -> None:
    guest = ScriptedGuest()
    task, end = await streaming(guest)
    end.port.refuse("that was wrong")
    assert (await task).ended_by is EndedBy.SANDBOX_LOST
    assert guest.heard.ends == ["it sent what it must not: that was wrong"]


async def test_run_whose_guest_does_not_know_its_stream_does_not_begin() -> None:
    """As the guest of a session that an earlier version of the engine began. Twin: a plain run."""
    guest = ScriptedGuest(ready=False)
    guest.says({key: value for key, value in READY.items() if key != "streams"})
    sent = len(guest.wire.messages)
    streams = (Stream(StreamKind("network"), End),)
    with pytest.raises(SandboxUnavailable, match="does not know network") as refused:
        await guest.channel.run("python", {"code": "1"}, LIMITS, RunSinks(streams=streams), "call")
    with pytest.raises(SandboxUnavailable, match="does not know ports"):
        guest.channel.opened(Stream(StreamKind("ports"), End))
    guest.channel.interrupt_streams()
    assert (len(guest.wire.messages), refused.value.may_retry) == (sent, False)
    _, task = await begun(guest)
    guest.says(ended())
    assert (await task).ended_by is EndedBy.OK


async def test_stream_of_a_container_is_opened_once_and_ends_with_the_channel() -> None:
    guest, ports = ScriptedGuest(), Stream(StreamKind("ports"), End)
    end = guest.channel.opened(ports)
    assert guest.channel.opened(ports) is end
    guest.says_in("ports", b"in", NO_RUN)
    end.port.send(b"out")
    assert (end.frames, guest.wire.frames) == ([b"in"], [StreamFrame("ports", NO_RUN, b"out")])
    guest.channel.interrupt_streams()
    assert (end.interrupted, end.is_closed) == (1, False)
    guest.channel.end("it is over")
    assert end.is_closed
    late = ScriptedGuest()
    late.channel.end("it is over")
    assert late.channel.opened(ports).is_closed


@pytest.mark.row("B3", "P8")
async def test_frame_of_a_stream_during_a_cancellation_is_dropped() -> None:
    guest = ScriptedGuest()
    task, end = await streaming(guest)
    task.cancel()
    await asyncio.sleep(0)
    guest.says_in("network", b"late")
    guest.says(ended(ended_by="cancelled"))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert end.frames == []
    assert guest.heard.ends == []


@pytest.mark.row("B3", "S4")
async def test_host_clock_is_paused_while_a_stream_waits_for_approval() -> None:
    guest = ScriptedGuest(SHORT_CLOCKS)
    task, end = await streaming(guest, QUICK)
    end.port.pause(is_paused=True)
    control = ScriptedGuest(SHORT_CLOCKS)
    _, controlled = await begun(control, QUICK)
    assert (await controlled).ended_by is EndedBy.WALL_TIME
    assert not task.done()
    end.port.pause(is_paused=False)
    assert (await task).ended_by is EndedBy.WALL_TIME
    told = [one["paused"] for one in guest.wire.messages if one["op"] == "pause"]
    assert told == [True, False]


@pytest.mark.row("B3")
async def test_guest_that_does_not_read_a_stream_is_ended() -> None:
    guest = ScriptedGuest()
    task, end = await streaming(guest)
    guest.wire.unsent_bytes = MAX_UNREAD_BYTES
    end.port.send(b"x")  # the twin
    guest.wire.unsent_bytes += 1
    end.port.send(b"x")
    assert (await task).ended_by is EndedBy.SANDBOX_LOST
    assert guest.heard.ends == ["it did not read the frames of a stream (network)"]
    assert len(guest.wire.frames) == 1


@pytest.mark.row("B3")
def test_importing_a_module_of_a_stream_needs_no_preloaded_module() -> None:
    assert needs_preloaded("import tools")
    assert not needs_preloaded("import tools, json", ["tools"])
    assert needs_preloaded("import tools.deeper", ["tools"])
    assert needs_preloaded("import numpy, tools", ["tools"])


class _Docker:
    """Runs a relay that has said something before its stream is there."""

    def __init__(self, said: bytes) -> None:
        self.said = said
        self.ours, self.guests = socket.socketpair()

    async def take_over(self, name: str, epoch: int) -> DockerStreams:
        return DockerStreams(self.ours, self.said)


async def take_over(docker: Any) -> Container:
    with anyio.fail_after(120):
        return await Container.take_over(
            docker, "name", "id", grade=Grade.NAMESPACES, required=frozenset(Limit),
            least=Grade.NAMESPACES, epoch=2,
        )  # fmt: skip


async def test_guest_that_was_ready_before_its_stream_was_there_is_taken_over() -> None:
    docker = _Docker(record(1, framing.encode(READY)))
    container = await take_over(docker)
    assert container.is_free
    container.end("the test is over")
    docker.guests.close()


async def test_guest_that_lied_before_its_stream_was_there_is_refused_and_left() -> None:
    docker = _Docker(b"no record of Docker's")
    with pytest.raises(ContainerFailed):
        await take_over(docker)
    docker.guests.settimeout(10)
    assert await anyio.to_thread.run_sync(docker.guests.recv, 1) == b""
    docker.guests.close()


@pytest.mark.parametrize("is_early", [False, True])
async def test_program_whose_framing_breaks_is_disconnected(is_early: bool) -> None:
    wire, program = Wire(), ProgramStreams()
    if not is_early:
        program.connection_made(wire)
    program.stream_broken("no record")
    if is_early:
        program.connection_made(wire)
    assert wire.is_aborted
