"""The chain of a session: the processes that hold the session's variables between calls.

Guest side, used by the supervisor. Between calls, the chain has two stopped processes, which are
called the waiting processes. The first process ran the last call and will run the next one. The
other is a copy of the first, which was made at the end of the last call (see `link`). If the first
process is killed during a call, the copy takes its place, with the variables from before that call.
If the first process still has threads after a call, the copy also takes its place.

Messages from these processes are not trusted, because programs of the session ran in them. Only the
process id of a message's sender is trusted, because the kernel adds it. Invariant: the supervisor
stops waiting for these processes once they have used a few seconds of CPU time or have slept for a
few seconds. At worst, the variables are lost.
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
"""Maximum CPU time in seconds that a process may use for copying itself, and that the supervisor
may use for waiting for the copy.
"""

LOOK_S = 0.1
IDLE_LOOKS = 30
"""Maximum number of checks at which a process that must copy itself may be found asleep. There are
`LOOK_S` seconds between two checks.
"""
BLOCKED_LOOKS = 100
"""Maximum number of checks at which a process that must copy itself may be found asleep or waiting
for a disk. There are `LOOK_S` seconds between two checks. A limit is needed because a program can
seem to wait for a disk for ever (vfork), and because the host ends a container after a minute.
"""

MAX_MESSAGES = 4096
"""Maximum number of messages that are read at once. The socket cannot hold more messages."""

WATCH_S = 0.5
"""Seconds between checks that the waiting processes are stopped."""

AWAKE_NS = 5_000_000
"""Maximum CPU time in nanoseconds that a stopped process of the chain may use. If it uses more, it
counts as running.
"""

END_CPU_S = 1.0
"""Maximum CPU time in seconds that the supervisor uses for killing a program's descendants before
the program's process copies itself.
"""


class Chain:
    """The processes that hold the variables of one session between calls. The chain may be empty.

    Otherwise, it consists of two stopped processes between calls. The first process runs the next
    call. The second is a copy of the first, and takes its place if the first is killed.

    The processes inherit the sockets `orders_end` and `wake_end`. Through the first socket, the
    supervisor sends orders to the first process. Through the second, it sends the message WAKE to
    the copy, which then becomes the first process.
    """

    def __init__(
        self,
        reap: Callable[[], None],
        kill: Callable[[Collection[int]], int],
        frozen: Callable[[Collection[int]], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        """Create an empty chain. The arguments are functions of the supervisor.

        - `reap` reaps all dead children.
        - `kill` kills all processes of programs, except those whose ids it gets. It returns the
          number of processes that it has killed.
        - `frozen` gets the ids of processes to spare, and returns a context manager. This yields a
          function that stops all other registered processes, which run beside calls. When the block
          ends, they are resumed.
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
        """Id of the process that holds the variables, or None if there are none."""
        self._behind: int | None = None
        self._aside: dict[str, int] = {}
        """Token of a trial → id of the process with the trial's variables."""
        self._seen_awake: dict[int, int] = {}
        """Id of each process that was not stopped at the last check → its CPU time at that check.
        """
        self._used_ns: dict[int, int] = {}
        """Id of each waiting process → its CPU time when it was first seen stopped."""
        self._are_ended = False
        """Whether the waiting processes were killed between two calls, and `tell_end` must still
        report it.
        """

    @property
    def pids(self) -> set[int]:
        """Ids of the processes that must not be killed when the container is cleaned after a
        run.
        """
        return {*self._waiting, *self._aside.values()}

    @property
    def has_trial(self) -> bool:
        """Whether the process of at least one trial is waiting, stopped, until the trial is adopted
        or dropped.
        """
        return bool(self._aside)

    @property
    def _waiting(self) -> set[int]:
        return {pid for pid in (self.first, self._behind) if pid is not None}

    def begin(self, *descriptors: int) -> int | None:
        """Start a call in the chain's first process: pass it the call's `descriptors`, and resume
        it.

        Return the id of this process. Return None if the chain is empty, or if it cannot be used
        and is now empty.
        """
        self._used_ns.clear()
        if self.first is None:  # the new chain must not read what the killed one left unread
            self._take_back()
            self._take_back_wake()
            return None
        try:
            self._order(TAKE, descriptors)
            processes.send(self.first, signal.SIGCONT)
        except OSError:  # a program has closed the socket, which the copy also needs
            self.first = self._behind = None
        return self.first

    def settle(self, stayed: int | None) -> str:
        """Update the chain after a call. The processes that will hold the session's variables are
        stopped. All other processes of programs are killed.

        `stayed` is the id of the call's process if this process reported that it has finished and
        stays alive, otherwise None. Return one of these words:

        * `kept`: the call's variables are kept.
        * `rolled_back`: the variables from before the call are restored.
        * `reset`: all variables are lost.
        """
        before = self._behind
        if stayed is not None:
            self.first, self._behind = stayed, self._received(stayed)[0]
            if self._goes_on(spared=before):
                self.drop()  # trials were based on the previous variables
                return "kept"
        self.first, self._behind = before, None
        if before is not None and self._is_woken(before):
            return "rolled_back"
        self.first = self._behind = None
        self._end_the_others()
        return "rolled_back" if before is None and stayed is None else "reset"

    def put_aside(self, stayed: int | None, token: str) -> str:
        """Update the chain after a trial. The trial's process is kept under the name `token`, so
        that `adopt` can use it. The variables from before the trial are restored.

        `stayed` is the id of the trial's process if this process reported that it has finished and
        stays alive, otherwise None. Return one of these words:

        * `kept`: the trial's process is kept.
        * `rolled_back`: the trial's process is not kept.
        * `reset`: the variables from before the trial are lost.
        """
        before, self.first, self._behind = self._behind, None, None
        is_kept = stayed is not None and processes.threads_of(stayed) == 1
        if stayed is not None and is_kept:
            self._aside[token] = stayed
            with contextlib.suppress(ProcessLookupError):
                processes.send(stayed, signal.SIGSTOP)
        if before is None:
            self._end_the_others()
        elif not self._is_woken(before):
            self.first = self._behind = None
            self._end_the_others()
            return "reset"
        return "kept" if is_kept else "rolled_back"

    def adopt(self, token: str) -> bool:
        """Replace the session's variables by those of the trial `token`. Return whether this
        succeeded: False means that the trial's variables are lost.
        """
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
        """Discard the variables of the trial `token`. If `token` is None, discard those of all
        trials.
        """
        for one in [token] if token is not None else list(self._aside):
            if (pid := self._aside.pop(one, None)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    processes.send(pid, signal.SIGKILL)

    def look(self) -> bool:
        """Check that the session's variables still exist, and stop the processes that hold them.
        The caller must use this method after a call that did not use the variables.

        Return False if the variables were lost, otherwise True.
        """
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
        """Return False if a process of the chain runs although it should be stopped. Also send each
        process another stop signal.

        A process counts as running in each of these cases:

        * It is stopped, but has used more than `AWAKE_NS` of CPU time since it was first seen
          stopped.
        * It was found not stopped at two successive checks, and has used CPU time between them.
        """
        # On a busy host, a process may need some time to stop. But a program can also make its
        # stopped process run: by a timer whose signal is SIGCONT, or by a child or parent at whose
        # end the kernel sends SIGCONT.
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
        """Kill all processes of the chain, so that the session's variables are lost. The next call
        of `tell_end` returns True.
        """
        ended, self.first, self._behind = self.pids, None, None
        self._aside.clear()
        self._used_ns.clear()
        self._are_ended = True
        for pid in ended:
            with contextlib.suppress(ProcessLookupError):
                processes.send(pid, signal.SIGKILL)

    def tell_end(self) -> bool:
        """Return whether `end` was called since `tell_end` was last called."""
        are_ended, self._are_ended = self._are_ended, False
        return are_ended

    def stop(self) -> None:
        """Stop the processes that hold the session's variables. The caller must ensure that every
        process that could resume them is gone.

        If one of these processes has a terminal, kill all of them instead.
        """
        self._used_ns.clear()
        self._seen_awake.clear()
        self._stop()
        # The kernel resumes such a process when its terminal is closed, which may be at any time.
        if any(map(processes.has_terminal, self.pids)):
            self.end()
            self._end_the_others()

    def _goes_on(self, spared: int | None) -> bool:
        """Prepare the chain for the next call. Return whether it then has a living first process
        and a copy of it.

        If the process in `first` has several threads, its copy becomes the first process, and is
        copied. All other processes of programs are killed, except the process `spared`, which the
        caller still needs.
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
        """Make the copy `pid` the first process, and let it copy itself. Return whether the new
        copy was made.

        All other processes of programs are killed, except the process `spared`.
        """
        self.first, self._behind = pid, None
        self._end_the_others(spared)
        self._take_back()
        self._take_back_wake()
        with contextlib.suppress(OSError):
            self._wake.send(WAKE)
        self._behind = self._await_copy(pid)
        return self._behind is not None

    def _copy_of(self, pid: int) -> int | None:
        """Order the first process `pid` to copy itself, because it has no copy. Return the copy's
        id, or None if this fails.
        """
        try:
            self._order(COPY, ())
        except OSError:
            return None
        return self._await_copy(pid)

    def _await_copy(self, pid: int) -> int | None:
        """Resume the process `pid`, and wait until it reports that it has copied itself. Then stop
        the process and its copy.

        Return the copy's id, or None if the process failed or took too long.
        """
        self._received(pid)  # discards earlier messages
        found, is_done = None, False
        effort = _Effort(pid)
        with contextlib.suppress(ProcessLookupError):
            processes.send(pid, signal.SIGCONT)
        # Registered processes could use all CPU time if the process has the lowest priority.
        with self._frozen(self.pids) as freeze:
            # Both must have sent their message: if one is stopped before, the other waits for it.
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
        """Read all messages from the chain's processes. Return two values:

        * The id of the new copy. This is the process other than `pid` that was the last to send
          READY. The id is None if there is no such process, or if it is dead.
        * Whether the process `pid` has sent DONE, which means that its attempt to copy itself is
          over.
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
        """Send `order` to the first process, together with the descriptors of a call if there are
        any. Raises OSError if this fails.
        """
        self._take_back()
        assert len(descriptors) in (0, DESCRIPTORS)
        if descriptors:
            socket.send_fds(self._orders, [order], descriptors)
        else:
            self._orders.send(order)

    def _take_back(self) -> None:
        """Discard orders that no process has read. Otherwise, a process that takes the place of a
        killed first process would read them.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                order, descriptors, _ = receive(
                    self.orders_end, 1, DESCRIPTORS, socket.MSG_DONTWAIT
                )
                if not order:  # a program has shut down its end for ever
                    break
                for descriptor in descriptors:
                    os.close(descriptor)

    def _take_back_wake(self) -> None:
        """Discard WAKE messages that no copy has read. Otherwise, the next copy would read one, and
        act as the first process too early.
        """
        with contextlib.suppress(OSError):  # there is none, or a program has shut the socket down
            while self.wake_end.recv(64, socket.MSG_DONTWAIT):
                pass

    def _stop(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                processes.send(pid, signal.SIGSTOP)

    def _end_the_others(self, spared: int | None = None) -> None:
        """Kill all processes of programs, except those of the chain and the process `spared`.

        If this takes too long, give up. The cleaning after the run then kills the processes that
        are left.
        """
        patience = processes.Patience(END_CPU_S)
        kept = self.pids | ({spared} if spared is not None else set())
        while self._kill(kept) and patience.rest():
            self._reap()


class _Effort:
    """Decides whether the supervisor should continue to wait until the process `pid` has copied
    itself.

    The wait ends if the process and its descendants use too much CPU time, or sleep for too long.
    It also ends if the supervisor uses too much CPU time.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._own_until_s = time.process_time() + COPY_CPU_S
        self._idle_looks = 0
        self._blocked_looks = 0
        self._first_ns: int | None = None
        self._used_ns = 0

    def look(self) -> None:
        """Measure the CPU time of the process and its descendants, and check whether they are
        asleep.

        The caller must use this method each time that no message has arrived for `LOOK_S` seconds.
        """
        them = {self._pid, *trees.below(self._pid)}
        used_ns = sum(kernel.process_cpu_ns(pid) or 0 for pid in them)
        self._first_ns = self._first_ns or used_ns
        self._used_ns = used_ns - self._first_ns
        self._idle_looks += not any(map(processes.works, them))
        self._blocked_looks += not any(map(processes.runs, them))

    def is_worth_it(self) -> bool:
        """Return whether the supervisor should continue to wait for the copy."""
        return (
            self._idle_looks < IDLE_LOOKS
            and self._blocked_looks < BLOCKED_LOOKS
            and self._used_ns < COPY_CPU_S * 1e9
            and time.process_time() < self._own_until_s  # they may send messages without end
        )
