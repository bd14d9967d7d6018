"""The guest channel's boundary: guests that lie, hang or die, and forged frames.

The engine answers with a documented code in bounded time and replaces the guest without
affecting other calls.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from fumehood import Config, Engine
from fumehood.interpreter import sticky_guest
from fumehood.interpreter.wall import InterpreterWall
from fumehood.sandbox.process import channel
from support.processes import children_of_guest, guest_of, is_computing, is_gone
from support.wait import DEADLINE_S, wait_until

BAD_GUEST = Path(__file__).parents[1] / "support" / "bad_guest.py"
SLOW = "pow(7, 10**4200, 10**4200 + 7)"


def bad_guest(mode: str) -> InterpreterWall:
    return InterpreterWall(command=[sys.executable, "-I", "-S", str(BAD_GUEST), mode])


@pytest.fixture
def _soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the grace period, because these guests never answer."""
    monkeypatch.setattr(channel, "ANSWER_GRACE_S", 1.0)
    monkeypatch.setattr(sticky_guest, "KILL_GRACE_S", 1.0)


LOST = [
    "dies", "garbage", "huge-frame", "not-json", "deep-json", "other-op", "extra-field",
    "wrong-type", "unknown-ending", "ok-without-result", "result-of-another-form",
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.row("S2", "S4", "E1")
@pytest.mark.parametrize("mode", LOST)
async def test_malformed_guest_reply_is_sandbox_unavailable_and_guest_is_replaced(
    mode: str, home: Path
) -> None:
    async with Engine(config=Config(home=home), interpreter=bad_guest(mode)) as engine:
        for _ in range(2):  # the second call shows that there is a new guest
            envelope = await engine.call("calculator", {"expression": "2 + 2"}, isolation="call")
            assert envelope.error.code == "SANDBOX_UNAVAILABLE"
            assert envelope.error.retryable is True
            assert envelope.metadata.sandbox.ended_by == "sandbox_lost"


@pytest.mark.anyio
@pytest.mark.row("D6")
async def test_exit_status_of_killed_guest_is_reaped_by_one_waiter_only(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second poller could reap the child first; the waiter would then log a warning."""
    polled: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "poll", lambda process: polled.append(process.pid))
    async with Engine(config=Config(home=home)) as engine:
        guest = psutil.Process(engine.walls["interpreter"]["guest_pid"])
        assert (await engine.call("calculator", {"expression": "2 + 2"})).success
    assert is_gone(guest)
    assert polled == []
    assert caplog.records == []


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["honest", "answers-twice", "answers-others-first"])
async def test_twin_duplicate_or_foreign_guest_replies_are_ignored(mode: str, home: Path) -> None:
    async with Engine(config=Config(home=home), interpreter=bad_guest(mode)) as engine:
        for _ in range(3):
            envelope = await engine.call("calculator", {"expression": "2 + 2"}, isolation="call")
            assert envelope.data == {"value": 4, "text": "4"}


LENDS_BADLY = {
    "no-descriptors": "SANDBOX_UNAVAILABLE", "one-descriptor": "SANDBOX_UNAVAILABLE",
    "files": "SANDBOX_UNAVAILABLE", "sockets": "SANDBOX_UNAVAILABLE",
    "short-data": "SANDBOX_UNAVAILABLE",
    # It died before it was asked, or while: the kernel knows no difference.
    "dead-pipes": {"SANDBOX_UNAVAILABLE", "EXECUTION_ERROR"},
    "garbage": {"SANDBOX_UNAVAILABLE", "OUTPUT_LIMIT_EXCEEDED"},
    "huge-frame": "OUTPUT_LIMIT_EXCEEDED", "not-json": "SANDBOX_UNAVAILABLE",
    "deep-json": "SANDBOX_UNAVAILABLE", "closes": "SANDBOX_UNAVAILABLE",
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.row("S2", "S4", "E1")
@pytest.mark.parametrize("mode", LENDS_BADLY)
async def test_misbehaving_lent_child_is_killed_and_replaced_without_descriptor_leak(
    mode: str, home: Path
) -> None:
    """Neither the process behind the two pipes nor the pipes themselves can be trusted."""
    async with Engine(config=Config(home=home), interpreter=bad_guest(f"lends-{mode}")) as engine:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with anyio.fail_after(DEADLINE_S):
                envelope = await engine.call("calculator", {"expression": "2 + 2"})
            expected = LENDS_BADLY[mode]
            assert envelope.error.code in ({expected} if isinstance(expected, str) else expected)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)


@pytest.mark.anyio
@pytest.mark.row("P8", "S4")
async def test_call_fails_if_guest_dies_while_handing_over_a_child(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest dies after the pipes have arrived and before the call has taken them."""
    receive = sticky_guest.StickyGuest._on_handover

    def receive_and_die(guest: sticky_guest.StickyGuest) -> None:
        receive(guest)
        guest.kill()

    monkeypatch.setattr(sticky_guest.StickyGuest, "_on_handover", receive_and_die)
    wall = bad_guest("lends-honest")
    async with Engine(config=Config(home=home), interpreter=wall) as engine:
        with anyio.fail_after(DEADLINE_S):
            envelope = await engine.call("calculator", {"expression": "2 + 2"}, timeout_seconds=2)
        assert envelope.error.code == "SANDBOX_UNAVAILABLE"


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["honest", "answers-twice"])
async def test_twin_lent_child_that_answers_serves_the_call(mode: str, home: Path) -> None:
    async with Engine(config=Config(home=home), interpreter=bad_guest(f"lends-{mode}")) as engine:
        envelope = await engine.call("calculator", {"expression": "2 + 2"})
        assert envelope.data == {"value": 4, "text": "4"}


@pytest.mark.anyio
@pytest.mark.row("P8", "S4")
@pytest.mark.usefixtures("_soon_given_up")
async def test_guest_that_does_not_confirm_child_death_after_timeout_is_killed(home: Path) -> None:
    wall = bad_guest("lends-never-buries")
    async with Engine(config=Config(home=home), interpreter=wall) as engine:
        guest = psutil.Process(wall.guest_pid)
        with anyio.fail_after(DEADLINE_S):
            envelope = await engine.call("calculator", {"expression": "2 + 2"}, timeout_seconds=0.1)
        assert envelope.error.code == "TIMEOUT"
        wait_until(lambda: is_gone(guest))


@pytest.mark.anyio
@pytest.mark.row("P8", "S4")
@pytest.mark.usefixtures("_soon_given_up")
@pytest.mark.parametrize("mode", ["never-answers", "half-a-frame"])
async def test_guest_that_never_answers_times_out_and_is_killed(mode: str, home: Path) -> None:
    wall = bad_guest(mode)
    async with Engine(config=Config(home=home), interpreter=wall) as engine:
        guest = psutil.Process(wall.guest_pid)
        with anyio.fail_after(DEADLINE_S):
            envelope = await engine.call(
                "calculator", {"expression": "2 + 2"}, timeout_seconds=0.1, isolation="call"
            )
        assert envelope.error.code == "TIMEOUT"
        wait_until(lambda: is_gone(guest))


@pytest.mark.anyio
@pytest.mark.row("S1")
async def test_guest_that_cannot_enforce_memory_limit_is_refused(home: Path) -> None:
    async with Engine(config=Config(home=home), interpreter=bad_guest("weak")) as engine:
        envelope = await engine.call("calculator", {"expression": "2 + 2"})
        assert envelope.error.code == "SANDBOX_UNAVAILABLE"
        assert "memory" in envelope.error.message
        assert envelope.metadata.sandbox is None


@pytest.mark.anyio
@pytest.mark.row("S1")
async def test_guest_that_fails_to_start_is_sandbox_unavailable(home: Path) -> None:
    async with Engine(config=Config(home=home), interpreter=bad_guest("dies-at-once")) as engine:
        envelope = await engine.call("calculator", {"expression": "2 + 2"})
        assert envelope.error.code == "SANDBOX_UNAVAILABLE"


@pytest.mark.row("S2", "S4")
def test_killed_guest_is_replaced_and_calls_are_served_again(start_daemon) -> None:
    daemon = start_daemon()
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]
    for _ in range(3):
        guest = guest_of(daemon.process.pid)
        family = [guest, *guest.children(recursive=True)]
        os.kill(guest.pid, signal.SIGKILL)
        # A child that outlived its supervisor may still answer, or die at any of these calls.
        for _ in range(2):
            assert client.calculate("2 + 2").code in (None, "SANDBOX_UNAVAILABLE")
        wait_until(lambda family=family: all(is_gone(process) for process in family))
        wait_until(lambda: client.calculate("2 + 2").body["data"] == {"value": 4, "text": "4"})
        assert guest_of(daemon.process.pid).pid != guest.pid
        assert client.calculate("2 + 2").body["data"] == {"value": 4, "text": "4"}


@pytest.mark.row("S2", "S4")
@pytest.mark.parametrize("victim", ["zygote", "resident"])
def test_killed_zygote_or_resident_is_replaced(start_daemon, victim: str) -> None:
    daemon = start_daemon()
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]
    zygote, *rest = children_of_guest(guest_of(daemon.process.pid))
    for process in [zygote] if victim == "zygote" else rest:
        process.send_signal(signal.SIGKILL)
    answers = [client.calculate("2 + 2") for _ in range(3)]
    assert {answer.code for answer in answers} <= {None, "SANDBOX_UNAVAILABLE"}
    # On a busy host the death may be noticed after any of them.
    wait_until(lambda: client.calculate("2 + 2").body["data"] == {"value": 4, "text": "4"})


@pytest.mark.anyio
@pytest.mark.row("P8", "S4")
async def test_guest_kill_fails_running_call_and_queued_call_is_served(
    engine: Engine,
) -> None:
    answers = []

    async def call(expression: str) -> None:
        answers.append(
            await engine.call("calculator", {"expression": expression}, timeout_seconds=20)
        )

    pid = engine.walls["interpreter"]["guest_pid"]
    async with anyio.create_task_group() as group:
        group.start_soon(call, f"{SLOW} + {SLOW} + {SLOW} + {SLOW} + {SLOW}")
        while not _is_busy(pid):
            await anyio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        # A call before the engine has noticed would still go to the dead guest.
        while engine.walls["interpreter"]["guest_pid"] == pid:
            await anyio.sleep(0.01)
        group.start_soon(call, "2 + 2")
    codes = sorted(answer.error.code if answer.error else "OK" for answer in answers)
    assert codes == ["OK", "SANDBOX_UNAVAILABLE"]


def _is_busy(pid: int) -> bool:
    """Whether a child of this guest uses CPU time, according to the kernel."""
    return is_computing(psutil.Process(pid))


@pytest.mark.anyio
@pytest.mark.row("P8")
async def test_cancelled_call_stops_the_computation(engine: Engine) -> None:
    pid = engine.walls["interpreter"]["guest_pid"]
    async with anyio.create_task_group() as group:
        group.start_soon(engine.call, "calculator", {"expression": "+".join([SLOW] * 9)})
        while not _is_busy(pid):
            await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert not _is_busy(pid)
    assert (await engine.call("calculator", {"expression": "1 + 1"})).success


@pytest.mark.anyio
@pytest.mark.row("P8", "S4")
async def test_timed_out_computation_has_ended_when_its_answer_arrives(engine: Engine) -> None:
    pid = engine.walls["interpreter"]["guest_pid"]
    envelope = await engine.call(
        "calculator", {"expression": "+".join([SLOW] * 9)}, timeout_seconds=0.2
    )
    assert envelope.error.code == "TIMEOUT"
    assert not _is_busy(pid)


@pytest.mark.anyio
@pytest.mark.row("S2")
async def test_slow_expression_does_not_block_other_calls_of_its_domain(engine: Engine) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(engine.call, "calculator", {"expression": "+".join([SLOW] * 9)})
        pid = engine.walls["interpreter"]["guest_pid"]
        while not _is_busy(pid):
            await anyio.sleep(0.01)
        quick = await engine.call("calculator", {"expression": "1 + 1"})
        assert quick.success
        assert quick.metadata.sandbox.isolation == "call"
        assert quick.metadata.resources.peak_memory_mb is not None
        group.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.row("S4")
async def test_memory_limit_ends_the_run_and_is_reported(engine: Engine) -> None:
    """The kernel's limit backs the size tables: many lists together exceed it."""
    lists = f"len([{','.join(['[0]*9999'] * 400)}])"  # 400 × 80 kB
    twin = await engine.call("calculator", {"expression": lists}, memory_limit_mb=64)
    assert twin.data["value"] == 400
    envelope = await engine.call("calculator", {"expression": lists}, memory_limit_mb=16)
    assert envelope.error.code == "MEMORY_LIMIT_EXCEEDED"
    assert envelope.error.details == {"ended_by": "memory", "limit": {"memory_mb": 16}}
    assert envelope.metadata.sandbox.limits.memory_mb == 16
    assert (await engine.call("calculator", {"expression": "1 + 1"})).success


@pytest.mark.anyio
@pytest.mark.row("S4")
async def test_cpu_limit_below_wall_time_ends_the_run_and_is_reported(home: Path) -> None:
    config = Config(home=home, interpreter={"cpu_seconds": 0.2})
    async with Engine(config=config) as engine:
        envelope = await engine.call(
            "calculator", {"expression": "+".join([SLOW] * 9)}, timeout_seconds=20
        )
        assert envelope.error.code == "TIMEOUT"
        assert envelope.metadata.sandbox.ended_by == "cpu_time"
        assert envelope.error.details == {"ended_by": "cpu_time", "limit": {"cpu_seconds": 0.2}}
        assert envelope.metadata.resources.cpu_ms is not None
        assert envelope.metadata.resources.cpu_ms >= 200


@pytest.mark.anyio
@pytest.mark.row("P8")
async def test_cancellation_racing_with_the_reply_does_not_kill_the_guest(engine: Engine) -> None:
    """If the reply has arrived but the task has not resumed, nothing is left to cancel."""
    guest = engine.walls["interpreter"]["guest_pid"]
    for delay_ms in range(60):
        with anyio.move_on_after(delay_ms / 20_000):
            await engine.call("calculator", {"expression": "1 + 1"})
    assert (await engine.call("calculator", {"expression": "1 + 1"})).success
    assert engine.walls["interpreter"]["guest_pid"] == guest
