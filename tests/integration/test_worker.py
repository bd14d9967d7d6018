"""Synchronous host functions run in a worker process, which is killed to stop a function."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import Process

from fumehood import Config, Engine
from fumehood.core.limits import MB, Limits
from fumehood.sandbox.host import Workers
from fumehood.sandbox.process.channel import GuestProcess
from support import host_tools
from support.answers import sandbox_of
from support.processes import is_gone
from support.recording import RecordingLog
from support.wait import wait_until

pytestmark = pytest.mark.anyio

TOOLS = [
    host_tools.who, host_tools.block, host_tools.end, host_tools.end_harmlessly, host_tools.fail,
    host_tools.refuse, host_tools.give,
]  # fmt: skip


@pytest.fixture
def log() -> RecordingLog:
    return RecordingLog()


@pytest.fixture
async def engine(home: Path, log: RecordingLog) -> AsyncIterator[Engine]:
    async with Engine(tools=TOOLS, config=Config(home=home), log=log) as running:
        yield running


async def read_when_there(note: Path) -> list[psutil.Process]:
    """The worker and its child process, as recorded by the function."""

    def is_written() -> bool:
        return note.exists() and note.read_text().endswith("\n")

    await anyio.to_thread.run_sync(wait_until, is_written)
    return _processes(note)


def _processes(note: Path) -> list[psutil.Process]:
    return [psutil.Process(int(pid)) for pid in note.read_text().split()]


@pytest.mark.row("S1", "T7")
async def test_synchronous_function_runs_in_a_reused_worker_process(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    first = await engine.call("who")
    assert first.error is None
    assert first.data["pid"] != os.getpid() == first.data["parent"]
    assert first.data["home"] == os.environ.get("HOME")
    assert (await engine.call("who")).data["pid"] == first.data["pid"]
    assert (sandbox_of(first).placement, sandbox_of(first).isolation) == ("host", "none")
    assert first.metadata.resources.cpu_ms is None
    assert capfd.readouterr().out == ""


@pytest.mark.row("P8")
async def test_timed_out_function_is_killed_with_its_child_processes(
    engine: Engine, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    results = []

    async def call() -> None:
        results.append(await engine.call("block", {"note": str(note)}, timeout_seconds=2))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        family = await read_when_there(note)
    assert results[0].error.code == "TIMEOUT"
    assert results[0].error.details["limit"] == {"timeout_seconds": 2}
    assert results[0].error.retryable is False
    await anyio.to_thread.run_sync(wait_until, lambda: all(map(is_gone, family)))
    assert (await engine.call("who")).data["pid"] != family[0].pid


@pytest.mark.row("P8")
async def test_cancelled_function_is_killed_with_its_child_processes(
    engine: Engine, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    async with anyio.create_task_group() as group:
        group.start_soon(engine.call, "block", {"note": str(note)})
        family = await read_when_there(note)
        group.cancel_scope.cancel()
    await anyio.to_thread.run_sync(wait_until, lambda: all(map(is_gone, family)))


@pytest.mark.parametrize("is_guest", [False, True], ids=["worker", "guest"])
async def test_process_whose_start_is_cancelled_is_ended(
    monkeypatch: pytest.MonkeyPatch, *, is_guest: bool
) -> None:
    started: list[Process] = []
    open_process = anyio.open_process

    async def open_and_cancel(*arguments: Any, **options: Any) -> Process:
        started.append(await open_process(*arguments, **options))
        scope.cancel()
        return started[-1]

    monkeypatch.setattr(anyio, "open_process", open_and_cancel)
    with anyio.CancelScope() as scope:
        if is_guest:
            await GuestProcess.start([sys.executable, "-c", "import time; time.sleep(600)"])
        else:
            await Workers().run({}, Limits(30, 30, None, MB), "alice")
    (process,) = started
    assert process.returncode is not None


@pytest.mark.row("S9")
async def test_stopping_engine_ends_its_workers(home: Path) -> None:
    async with Engine(tools=TOOLS, config=Config(home=home)) as engine:
        worker = psutil.Process((await engine.call("who")).data["pid"])
    assert is_gone(worker)


@pytest.mark.row("E1")
async def test_exited_worker_is_an_execution_error_and_is_replaced(engine: Engine) -> None:
    envelope = await engine.call("end", {"code": 3})
    assert (envelope.error.code, envelope.error.retryable) == ("EXECUTION_ERROR", False)
    assert "may or may not have taken effect" in envelope.error.message
    assert envelope.error.details == {"ended_by": "exit", "exit_code": 3, "signal": None}
    again = (await engine.call("end_harmlessly")).error
    assert (again.code, again.retryable) == ("EXECUTION_ERROR", True)
    assert (await engine.call("who")).success


async def test_worker_killed_from_outside_is_reported_with_its_signal(
    engine: Engine, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    results = []

    async def call() -> None:
        results.append(await engine.call("block", {"note": str(note)}))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        family = await read_when_there(note)
        os.kill(family[0].pid, signal.SIGKILL)
    assert results[0].error.details["signal"] == 9
    assert results[0].metadata.sandbox.ended_by == "signal"
    family[1].kill()  # nobody is left who could find it; see the limitations


async def test_idle_worker_that_died_is_replaced(engine: Engine) -> None:
    pid = (await engine.call("who")).data["pid"]
    os.kill(pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(
        wait_until, lambda: is_gone(psutil.Process(pid)) if psutil.pid_exists(pid) else True
    )
    envelope = await engine.call("who")
    assert envelope.error is None
    assert envelope.data["pid"] != pid


@pytest.mark.row("E1")
async def test_tool_error_and_tool_result_of_a_worker_reach_the_caller(engine: Engine) -> None:
    error = (await engine.call("refuse")).error
    assert (error.code, error.retryable, error.details) == ("NOT_TODAY", True, {"day": 1})
    given = await engine.call("give")
    assert given.data == {"a": 1}
    assert given.metadata.usage.tokens_used == 7


@pytest.mark.row("P9")
async def test_concurrent_calls_leave_at_most_two_workers(engine: Engine) -> None:
    workers = set()

    async def one() -> None:
        envelope = await engine.call("who")
        assert envelope.error is None
        workers.add(envelope.data["pid"])

    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(one)
    alive = [
        child
        for child in psutil.Process().children()
        if child.pid in workers and not is_gone(child)
    ]
    assert len(alive) <= 2
