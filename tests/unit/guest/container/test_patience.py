"""Waiting for killed and for stopped processes on a busy machine: time on the clock decides nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from fumehood.guest.container import cleaning, host, processes, selfcheck
from fumehood.guest.container.chain import Chain
from fumehood.guest.container.cleaning import Cleaner
from fumehood.guest.core import kernel
from fumehood.guest.process import supervisor
from fumehood.sandbox.container import container
from fumehood.sandbox.process import channel

pytestmark = pytest.mark.row("S6")


class Clock:
    """A machine on which an hour passes with each look, of which a process gets `cpu_s`."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._looks = 0

    def process_time(self) -> float:
        self._looks += 1
        return self._looks * self._cpu_s

    def monotonic(self) -> float:
        return self._looks * 3600.0

    def sleep(self, seconds: float) -> None:
        self._looks += 1


@pytest.mark.parametrize(("cpu_s", "is_over"), [(0.0001, True), (0.1, False)])
def test_only_processor_time_ends_the_wait_for_killed_processes(
    cpu_s: float, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gone after the five hundredth look, many hours later."""
    for module in (cleaning, processes):
        monkeypatch.setattr(module, "time", Clock(cpu_s))
    left = iter([1] * 500)
    trees = Mock()
    trees.kill_all.side_effect = lambda spared: next(left, 0)
    cleaner = Cleaner(
        Mock(), Mock(pids=set()), Mock(), Mock(), Mock(), lambda: None, Mock(pids=set()), trees
    )
    cleaner._is_counted = False
    assert cleaner.end_the_rest() is is_over
    assert (next(left, None) is None) is is_over


@pytest.mark.parametrize(("state", "is_over"), [(b"R", True), (b"D", True), (b"S", False)])
def test_wait_ends_if_nothing_has_had_anything_to_do_for_a_while(
    state: bytes, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is not killed then, such as a process of root. It is gone after 3,000 looks."""
    monkeypatch.setattr(processes, "time", Clock(0.0))
    monkeypatch.setattr(processes, "all_pids", lambda: [os.getpid(), 2])
    monkeypatch.setattr(processes, "status", lambda pid: b"\nState:\t" + state)
    patience = processes.Patience(2.0)
    assert all(patience.rest() for _ in range(3000)) is is_over


@contextmanager
def starved(tmp_path: Path, *, is_freed: bool = True) -> Iterator[int]:
    """A process that cannot stop now, because it waits in the kernel: for its new process, which
    waits to open a pipe before it begins its program. It is as one that gets no processor.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "import os, sys\n"
        "print(flush=True)\n"
        "opened = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=opened)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(pipe)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not processes.status(process.pid).startswith(b"\nState:\tD"):
            os.sched_yield()
        try:
            yield process.pid
        finally:
            if is_freed:
                os.kill(process.pid, signal.SIGCONT)
                os.close(os.open(pipe, os.O_WRONLY))


def test_process_that_has_not_had_a_processor_since_it_was_stopped_counts_as_stopped(
    tmp_path: Path,
) -> None:
    with starved(tmp_path) as pid:
        assert not processes.is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        assert processes.is_stopped(pid)


@pytest.fixture
def waiting() -> Iterator[Chain]:
    chain = Chain(Mock(), Mock(return_value=0), lambda spared: nullcontext(Mock()))
    yield chain
    chain.first = None
    for end in (chain._orders, chain.orders_end, chain._wake, chain.wake_end):
        end.close()


def test_session_keeps_its_variables_while_their_processes_have_no_processor_to_stop(
    waiting: Chain, tmp_path: Path
) -> None:
    with starved(tmp_path) as pid:
        waiting.first = pid
        waiting.stop()
        assert [waiting.are_asleep() for _ in range(5)] == [True] * 5


def test_registered_processes_are_stopped_while_the_variables_are_copied_if_that_takes_long(
    waiting: Chain, tmp_path: Path
) -> None:
    """They could keep the processors from a process that has given up its share (SCHED_IDLE)."""
    stopped: list[bool] = []

    @contextmanager
    def frozen(spared: object) -> Iterator[Callable[[], None]]:
        def stop() -> None:
            stopped.append(True)
            if len(stopped) == 3:
                os.kill(pid, signal.SIGKILL)  # it gets nowhere, and the wait is over
                os.close(os.open(tmp_path / "pipe", os.O_WRONLY))

        yield stop
        stopped.append(False)

    waiting._frozen = frozen
    with starved(tmp_path, is_freed=False) as pid:
        assert waiting._await_copy(pid) is None
    assert stopped == [True] * 3 + [False]


@pytest.mark.parametrize(("code", "is_asleep"), [("pass", False), ("time.sleep(60)", True)])
def test_waiting_process_that_is_not_stopped_counts_as_awake_if_it_uses_a_processor(
    code: str, is_asleep: bool, waiting: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not show that a signal is pending."""
    monkeypatch.setattr(processes, "is_stopped", lambda pid: False)
    monkeypatch.setattr(Chain, "_stop", lambda self: None)
    program = f"import time\nprint(flush=True)\nwhile True: {code}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        waiting.first = process.pid
        try:
            while processes.works(process.pid) is is_asleep:
                os.sched_yield()
            assert waiting.are_asleep()
            before_ns = kernel.process_cpu_ns(process.pid)
            while not is_asleep and kernel.process_cpu_ns(process.pid) == before_ns:
                os.sched_yield()
            assert waiting.are_asleep() is is_asleep
        finally:
            process.kill()


def test_hosts_give_up_on_a_slow_guest_before_it_takes_a_limit_for_missing() -> None:
    """The one is tried again; the other is a fault of the machine, which only its operator mends."""
    assert selfcheck.PROBE_PATIENCE_S > container.START_DEADLINE_S
    assert supervisor.PROBE_DEADLINE_S > channel.START_DEADLINE_S


def test_next_engine_waits_longer_than_a_guest_does_for_the_one_before() -> None:
    assert container.TAKEOVER_DEADLINE_S > host.PATIENCE_S
