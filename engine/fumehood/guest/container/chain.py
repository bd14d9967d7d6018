"""The chain of a session: the processes that hold its variables.

Guest side, used by the supervisor. Between calls there are two processes, both stopped: the first,
which ran the last call and will run the next, and the one behind it, a copy from the end of that
call (see `link`). If the first is killed, the copy takes its place, and the variables are those
from before the call. A first process that still has threads is replaced in the same way.

Messages of these processes are not trusted, because programs of the session ran in them; only the
sender's id is, which the kernel adds. Invariant: nothing here waits for them longer than it takes
them to use a few seconds of processor time or to sleep for a few seconds, and the worst outcome is
that the variables are lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from fumehood.guest.container import processes, trees
from fumehood.guest.container.link import COPY, DESCRIPTORS, DONE, READY, TAKE, WAKE
from fumehood.guest.core import kernel
from fumehood.guest.core.pipes import receive

COPY_CPU_S = 2.0
"""Processor time that a process has to copy itself."""

LOOK_S = 0.1
IDLE_LOOKS = 30
"""Looks at a process that is to copy itself, at which it only waits for something."""
BLOCKED_LOOKS = 100
"""The same, at which it has no processor and wants none: it may wait for a disk. A program can look
so for ever (vfork), and the host ends a container after a minute.
"""

MAX_MESSAGES = 4096
"""Messages of links read at once; more do not fit the socket."""

WATCH_S = 0.5
"""How often the waiting processes are checked: they must be stopped."""

AWAKE_NS = 5_000_000
"""CPU time that a waiting process may use before it counts as awake."""

END_CPU_S = 1.0
"""Processor time for the end of a program's descendants before its process copies itself."""


class Chain:
    """The processes that hold a session's variables, if any.

    `orders_end` and `wake_end` are those processes' ends of the two sockets.
    """

    def __init__(
        self,
        reap: Callable[[], None],
        kill: Callable[[Collection[int]], int],
        frozen: Callable[[Collection[int]], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        """`kill` kills all processes of programs but these, and returns their number. `frozen` lets
        its block stop all registered ones.
        """
        self._reap = reap
        self._kill = kill
        self._frozen = frozen
        self._orders, self.orders_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._orders.setblocking(False)
        self._wake, self.wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self.first: int | None = None
        """The process that holds the variables."""
        self._behind: int | None = None
        self._aside: dict[str, int] = {}
        """Token of a trial → the process with its variables."""
        self._seen_awake: dict[int, int] = {}
        """CPU time of the processes that were not stopped at the last look."""
        self._used_ns: dict[int, int] = {}
        """CPU time of the waiting processes when they were first seen stopped."""
        self._are_ended = False
        """Whether they were ended between two calls and no call was notified yet."""

    @property
    def pids(self) -> set[int]:
        """Ids of the processes that survive the cleaning."""
        return {*self._waiting, *self._aside.values()}

    @property
    def has_trial(self) -> bool:
        """Whether the process of a trial waits, maybe the parent of that of the next call."""
        return bool(self._aside)

    @property
    def _waiting(self) -> set[int]:
        return {pid for pid in (self.first, self._behind) if pid is not None}

    def begin(self, *descriptors: int) -> int | None:
        """Pass a call to the first process. Returns its id, or None without a chain."""
        self._used_ns.clear()
        if self.first is None:  # the new chain must not read what the killed one left unread
            self._take_back()
            self._take_back_wake()
            return None
        try:
            self._order(TAKE, descriptors)
            os.kill(self.first, signal.SIGCONT)
        except OSError:  # a program has shut the way: with the first, the one behind is of no use
            self.first = self._behind = None
        return self.first

    def settle(self, stayed: int | None) -> str:
        """Settle the chain after a call: stop the survivors, end the others.

        Returns what became of the variables.

        `stayed` is the process of the call if it reported that it is done and stays alive.
        """
        before = self._behind
        if stayed is not None:
            self.first, self._behind = stayed, self._received(stayed)[0]
            if self._goes_on(spared=before):
                self.drop()  # trials began with other variables
                return "kept"
        self.first, self._behind = before, None
        if before is not None and self._is_woken(before):
            return "rolled_back"
        self.first = self._behind = None
        self._end_the_others()
        return "rolled_back" if before is None and stayed is None else "reset"

    def put_aside(self, stayed: int | None, token: str) -> str:
        """Settle the chain after a trial: keep its process for `adopt`, and go on with the
        variables from before it. Returns `kept` if it is there, `rolled_back` if not, or `reset` if
        those from before are lost.
        """
        before, self.first, self._behind = self._behind, None, None
        is_kept = stayed is not None and processes.threads_of(stayed) == 1
        if stayed is not None and is_kept:
            self._aside[token] = stayed
            with contextlib.suppress(ProcessLookupError):
                os.kill(stayed, signal.SIGSTOP)
        if before is None:
            self._end_the_others()
        elif not self._is_woken(before):
            self.first = self._behind = None
            self._end_the_others()
            return "reset"
        return "kept" if is_kept else "rolled_back"

    def adopt(self, token: str) -> bool:
        """Go on with the variables of a trial. False if they are not there any more."""
        aside = self._aside.pop(token, None)
        if aside is None or not processes.is_alive(aside):
            return False
        self._aside.clear()
        self.first, self._behind = aside, None
        self._take_back()
        self._take_back_wake()
        if self._goes_on(spared=None):
            return True
        self.first = self._behind = None
        self._end_the_others()
        return False

    def drop(self, token: str | None = None) -> None:
        """Forget the variables of a trial, or of all."""
        for one in [token] if token is not None else list(self._aside):
            if (pid := self._aside.pop(one, None)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def look(self) -> bool:
        """Stop both again after a call outside the chain. Returns whether both are intact."""
        if self.tell_end():
            return False
        if not self._waiting:
            return True
        if len(self._waiting) == 2 and all(processes.is_alive(pid) for pid in self._waiting):
            self._stop()
            return True
        self.first = self._behind = None
        return False

    def are_asleep(self) -> bool:
        """Whether the waiting processes are stopped and have used no CPU time since they were first
        seen so. A stopped process can be woken by what it has prepared: a timer with SIGCONT as its
        signal, or a child or parent at whose end the kernel sends SIGCONT. On a busy host a process
        may not have stopped yet: it is stopped again, and counts as awake if it is seen so twice
        and has used CPU time in between.
        """
        was_awake, self._seen_awake = self._seen_awake, {}
        are_asleep = True
        for pid in self.pids:
            used_ns = kernel.process_cpu_ns(pid) or 0
            if processes.is_stopped(pid) or not processes.is_alive(pid):
                first_ns = self._used_ns.setdefault(pid, used_ns)
                are_asleep = are_asleep and used_ns - first_ns <= AWAKE_NS
            else:
                self._seen_awake[pid] = used_ns
                are_asleep = are_asleep and used_ns <= was_awake.get(pid, used_ns)
        self._stop()
        return are_asleep

    def end(self) -> None:
        """Kill the waiting processes, and their variables with them. `tell_end` reports it to the
        next call.
        """
        ended, self.first, self._behind = self.pids, None, None
        self._aside.clear()
        self._used_ns.clear()
        self._are_ended = True
        for pid in ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tell_end(self) -> bool:
        """Whether they were ended between two calls. Reported once."""
        are_ended, self._are_ended = self._are_ended, False
        return are_ended

    def stop(self) -> None:
        """Stop the waiting processes, once every process that could wake them is gone. One with a
        terminal would be woken when that is closed, whenever the kernel does so: it is ended.
        """
        self._used_ns.clear()
        self._seen_awake.clear()
        self._stop()
        if any(map(processes.has_terminal, self.pids)):
            self.end()
            self._end_the_others()

    def _goes_on(self, spared: int | None) -> bool:
        """Whether the process of the call, or its copy, can run the next call with a copy behind
        it. `spared` is not killed, because it is needed otherwise.
        """
        self._stop()
        self._end_the_others(spared)
        first = self.first
        if first is None or not processes.is_alive(first):
            return False
        if self._behind is None:
            self._behind = self._copy_of(first)
        if self._behind is None or not processes.is_alive(self._behind):
            return False
        if processes.threads_of(first) == 1:
            return True
        self.first, self._behind = self._behind, None
        self._end_the_others(spared)
        return self._is_woken(self.first, spared)

    def _is_woken(self, pid: int, spared: int | None = None) -> bool:
        """Whether the copy became the first process, with a copy of its own behind it."""
        self.first, self._behind = pid, None
        self._end_the_others(spared)
        self._take_back()
        self._take_back_wake()
        with contextlib.suppress(OSError):
            self._wake.send(WAKE)
        self._behind = self._await_copy(pid)
        return self._behind is not None

    def _copy_of(self, pid: int) -> int | None:
        """Make the first process copy itself again, after an earlier attempt failed for lack of
        room.
        """
        try:
            self._order(COPY, ())
        except OSError:
            return None
        return self._await_copy(pid)

    def _await_copy(self, pid: int) -> int | None:
        """Resume a process until it reports its copy; then both are stopped."""
        self._received(pid)  # earlier messages are void
        found, is_done = None, False
        effort = _Effort(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        # Registered processes could keep the processors from one that has given up its share.
        with self._frozen(self.pids) as freeze:
            # Both must have sent their message: one that is stopped before keeps the other waiting.
            while not is_done and effort.is_worth_it():
                if not processes.is_alive(pid):
                    return None
                if not select.select([self._orders], [], [], LOOK_S)[0]:
                    effort.look()
                    freeze()
                newer, is_done = self._received(pid)
                found = newer or found
        self._behind = found if is_done else None
        self._stop()
        return self._behind

    def _received(self, pid: int) -> tuple[int | None, bool]:
        """The last other process that reported being ready, and whether this one reported being
        done. The kernel identifies the senders.
        """
        found, is_done = None, False
        for _ in range(MAX_MESSAGES):
            try:
                message, _, credentials = receive(self._orders, 1, 0)
            except OSError:
                break
            if not message:
                break
            sender = credentials[0] if credentials is not None else None
            if message == READY and sender != pid:
                found = sender
            is_done = is_done or (message == DONE and sender == pid)
        is_there = found is not None and processes.is_alive(found)
        return found if is_there and processes.is_stranger(found or 0) else None, is_done

    def _order(self, order: bytes, descriptors: tuple[int, ...]) -> None:
        """Raises OSError."""
        self._take_back()
        assert len(descriptors) in (0, DESCRIPTORS)
        if descriptors:
            socket.send_fds(self._orders, [order], descriptors)
        else:
            self._orders.send(order)

    def _take_back(self) -> None:
        """Remove an order that a killed process has not read: its successor must not take it."""
        with contextlib.suppress(BlockingIOError):
            while True:
                order, descriptors, _ = receive(
                    self.orders_end, 1, DESCRIPTORS, socket.MSG_DONTWAIT
                )
                if not order:  # a program has shut down its end: that is so for ever
                    break
                for descriptor in descriptors:
                    os.close(descriptor)

    def _take_back_wake(self) -> None:
        """Remove a wake-up that a killed copy has not read."""
        with contextlib.suppress(OSError):  # nothing there; or a program has shut it down
            while self.wake_end.recv(64, socket.MSG_DONTWAIT):
                pass

    def _stop(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _end_the_others(self, spared: int | None = None) -> None:
        """Kill all others, briefly; the supervisor continues until none is left."""
        patience = processes.Patience(END_CPU_S)
        kept = self.pids | ({spared} if spared is not None else set())
        while self._kill(kept) and patience.rest():
            self._reap()


class _Effort:
    """What a process and those below it have done to make a copy, and this one to wait for it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._own_until_s = time.process_time() + COPY_CPU_S
        self._idle_looks = 0
        self._blocked_looks = 0
        self._first_ns: int | None = None
        self._used_ns = 0

    def look(self) -> None:
        """Look at them, because nothing came of them for a while."""
        them = {self._pid, *trees.below(self._pid)}
        used_ns = sum(kernel.process_cpu_ns(pid) or 0 for pid in them)
        self._first_ns = self._first_ns or used_ns
        self._used_ns = used_ns - self._first_ns
        self._idle_looks += not any(map(processes.works, them))
        self._blocked_looks += not any(map(processes.runs, them))

    def is_worth_it(self) -> bool:
        """Whether to wait longer."""
        return (
            self._idle_looks < IDLE_LOOKS
            and self._blocked_looks < BLOCKED_LOOKS
            and self._used_ns < COPY_CPU_S * 1e9
            and time.process_time() < self._own_until_s  # they may send messages without end
        )
