"""Cleaning: kill a run's processes and restore the container, or report why this failed.

Guest side, used by the supervisor. The cleaning keeps a session's files and the stopped processes
that hold its variables. After a run outside a session, a housekeeper sends the files to the host
and removes them. The housekeeper is a short-lived process of the programs' user, which is forked
when no process of the program is left. It writes its frames to the channel itself. The supervisor
waits for it for a limited time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fumehood.guest.container import gate, processes, workspace
from fumehood.guest.container.chain import Chain
from fumehood.guest.container.meter import Counters
from fumehood.guest.container.places import MARK
from fumehood.guest.container.prefork_pool import PreforkPools
from fumehood.guest.container.processes import KILL_CPU_S, Patience, become_user
from fumehood.guest.container.registered import Registered
from fumehood.guest.container.run import Run
from fumehood.guest.container.trees import Trees
from fumehood.guest.container.workspace import Mounts, message_queues
from fumehood.guest.core import children, kernel
from fumehood.guest.core.pipes import held, write_all
from fumehood.protocol import framing

CALM_CPU_S = 0.03
"""CPU time in seconds that the cleaning uses for killing before it stops all registered processes.
It must stop them if they start and end other processes all the time.
"""
TELL_S = 0.002
"""Seconds within which a zygote reports that it has reaped a process."""

HOUSEKEEPER_CPU_S = 20.0
"""Maximum CPU time of a housekeeper in seconds."""
HOUSEKEEPER_LOOKS = 20
"""Maximum number of checks at which a housekeeper may be found asleep, without having used CPU time
since the last check. There is a second between two checks.
"""
LEFT_OUT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Housekeeper:
    """The result of a housekeeper, which is a short-lived process that sends a program's files to
    the host and removes them.

    `left_out` is the number of files that it did not send; there may be more. `fault` is the reason
    why the housekeeper failed, or None if it succeeded.
    """

    left_out: int = 0
    fault: str | None = None


NOTHING_DONE = Housekeeper()


class Cleaner:
    """Kills the processes of a program, and checks that nothing of the program is left."""

    def __init__(
        self,
        pools: PreforkPools,
        chain: Chain,
        counters: Counters,
        mounts: Mounts,
        reap: Callable[[], None],
        relays: Callable[[], int | None],
        registered: Registered,
        trees: Trees,
    ) -> None:
        self._pools = pools
        self._relays = relays
        self._chain = chain
        self._counters = counters
        self._mounts = mounts
        self._reap = reap
        self._registered = registered
        self._trees = trees
        self._is_counted = counters.read("processes") is not None
        self._reaped: set[int] = set()
        """Ids of the processes that zygotes have reaped since the last check."""

    def on_reaped(self, pid: int) -> None:
        """Record that a zygote has reaped this process."""
        self._reaped.add(pid)

    def is_alone(self) -> bool:
        """Return whether exactly those processes exist that should, according to the kernel's
        count. Return False if the kernel does not count processes.

        The guest's processes, a session's waiting processes and registered processes should exist.
        In a session, a relay may also exist, which another engine has started to become the
        session's next host (see `takeover`).
        """
        if not self._is_counted:
            return False
        if not self._registered.pids:
            return self._fits(self._counters.read("processes"), 0)
        # The first attempt counts only known processes, the second also looks for others that may
        # exist. If the number of threads could have changed meanwhile, the count alone proves
        # nothing, so the processes are listed.
        for looks in (False, True):
            fits, is_certain = self._count(looks=looks)
            if fits and is_certain:
                return True
            if self._trees.strangers(self._chain.pids):
                return False
            if fits:
                return True
        return False

    def _count(self, *, looks: bool) -> tuple[bool, bool]:
        """Compare the kernel's count of processes with the expected number. `looks` has the same
        meaning as in `_fits`.

        Return two values: whether the count is as expected, and whether it is certain that
        registered processes have as many threads as at the last count.
        """
        counted = self._counters.read("processes")
        threads, is_certain = self._trees.count()
        return self._fits(counted, threads, looks=looks), is_certain

    def _fits(self, counted: int | None, registered: int, *, looks: bool = True) -> bool:
        """Return whether `counted`, the kernel's count of processes and threads, is as expected.
        Return False if `counted` is None, or if a zygote is still forking children.

        The expected number includes the guest's processes, the threads of a session's waiting
        processes, and `registered`, the number of threads of registered processes. It also includes
        relays (see `takeover`).

        If `looks` is True, and the count does not fit, search for relays and for dead children that
        were not reaped. Both are then included.
        """
        relays, spared = self._relays(), self._chain.pids
        if counted is None or not self._pools.is_settled:
            return False
        own = {os.getpid(), *self._pools.zygote_pids, *self._pools.pids, *self._registered.pids}
        more = counted - len(own) - registered - sum(map(processes.threads_of, spared))
        if more == (relays or 0) or not looks:
            return more == (relays or 0)
        if spared:
            more -= sum(processes.is_dead_child(pid, spared) for pid in processes.all_pids())
        if relays is None:
            return more == 0
        others = [pid for pid in processes.all_pids() if pid not in own]
        begun = [pid for pid in others if processes.origin_of(pid) == 0]  # started by Docker
        return more == sum(
            processes.threads_of(pid) for pid in begun if not processes.is_stranger(pid)
        )

    def end_the_rest(self) -> bool:
        """Kill the program's processes until none is left. Return False if a process could not be
        killed.

        Registered processes are spared, unless they cannot be told apart from the program's
        processes.
        """
        self._reaped.clear()
        with gate.closed():
            if not self._registered.pids:
                return self.is_alone() or self._kill_the_rest()
            if self._kill_beside():
                return True
            # Registered processes cannot be told apart from the program's, so all are killed.
            self._registered.kill_all()
            return self._kill_the_rest()

    def _kill_beside(self) -> bool:
        """Kill the program's processes, and spare registered processes. Return False if this does
        not succeed in time.
        """
        if not (self._is_counted and self._registered.get_orphans):
            return self._kill_uncounted()
        if all(self._count(looks=False)) or self._kill_the_rest(CALM_CPU_S):
            return True
        with self._trees.frozen(self._chain.pids) as freeze:
            return self._kill_the_rest(before_look=freeze)

    def _kill_uncounted(self) -> bool:
        """Kill the program's processes without a count by the kernel, and spare registered
        processes. Return False if this takes too long.

        The processes are listed and killed until two successive lists contain no process of the
        program.
        """
        # This is for gVisor. It does not count processes, and sends SIGHUP to process groups that
        # were stopped. So the processes are neither counted nor stopped. Two lists are needed
        # because a zygote reports a moment late that it has reaped a process.
        #
        # A process may vanish during the listing. It then counts as a registered process, because
        # only the parent of a registered process can have reaped it: orphans of the program belong
        # to the supervisor, which reaps none meanwhile, and any other parent is itself listed.
        # There are two exceptions: a zygote has reaped the process, or a trial's process is
        # waiting, for which the kernel reaps.
        patience = Patience(KILL_CPU_S)
        was_clean = False
        while True:
            found = self._trees.strangers(self._chain.pids)
            gone = {pid for pid in found if not children.status(pid)}
            processes.kill([pid for pid in found if pid not in gone])
            if found:
                time.sleep(TELL_S)
                self._pools.receive()
            hidden = gone if self._chain.has_trial else gone & self._reaped
            is_clean = len(gone) == len(found) and not hidden
            self._reaped.clear()
            self._reap()
            if is_clean and (was_clean or not found):
                return True
            was_clean = is_clean
            if not patience.rest():
                return False

    def _kill_the_rest(
        self, cpu_s: float = KILL_CPU_S, before_look: Callable[[], None] = lambda: None
    ) -> bool:
        patience = Patience(cpu_s)
        while True:
            before_look()
            has_more = self._trees.kill_all(self._chain.pids) or self._is_one_unseen()
            # A process that had begun before the gate was closed can be missed once.
            if not has_more and not (MARK is not None and self._trees.kill_all(self._chain.pids)):
                break
            self._reap()
            self._pools.receive()  # if memory ran out, a spare child may also be dead
            if not patience.rest():
                return False
        self._reap()
        return True

    def is_left_alone(self) -> bool:
        """Return whether no processes exist except the guest's processes, a session's waiting
        processes, and registered processes.

        If a process could be either the program's or a registered one, the program's processes are
        killed first.
        """
        for _ in range(2):  # a process that vanished during the first check may be Docker's
            if self.is_alone():
                return True
            if self._pools.is_settled and self._trees.intruders():
                return False
            if not self._trees.strangers(self._chain.pids):
                return True
        # Otherwise the stranger may be a registered process.
        return bool(self._registered.pids) and self._kill_beside()

    def keep_house(self, run: Run, *, is_over: bool) -> Housekeeper:
        """Send the run's files to the host, and return what was achieved.

        Outside a session, all files are sent, and the mounts are emptied. In a session, only
        figures and files that have changed since the run began are sent, and only the figures are
        removed. For some runs of a session, no files are sent. If the run has no process, or the
        host that began it is gone, do nothing.

        `is_over` says whether all processes of the run are gone. If it is False, do nothing, and
        return a `Housekeeper` with this fault.
        """
        if not is_over:
            left_out = int(not self._mounts.are_clean())  # at least
            fault = "a process of the program could not be ended"
            return Housekeeper(left_out, fault)
        if run.child is None or run.is_left:
            return NOTHING_DONE
        if not run.keep:
            return keep_house(run.id, self._mounts)
        # Files that the session's owner has changed are not sent back.
        is_quiet = run.program == "files" or (run.quiet and not workspace.has_figures())
        if is_quiet or not workspace.has_changed(run.since_ns):
            return NOTHING_DONE
        return keep_house(run.id, self._mounts, since_ns=run.since_ns)

    def why_not_clean(self, run: Run, housekeeper: Housekeeper) -> str | None:
        """Return the reason why the container is not clean after a run, or None if it is clean.
        `housekeeper` says what `keep_house` achieved.
        """
        if housekeeper.fault is not None:
            return housekeeper.fault
        if not self.is_left_alone():
            return "a process of the program is left"
        if not run.keep and not self._mounts.are_clean():
            return "a file of the program is left"
        if not self._mounts.are_the_same():
            return "a mount has changed"
        if message_queues():
            return "a message queue of the program is left"
        return None

    def _is_one_unseen(self) -> bool:
        """Return whether the kernel's count differs from the expected number of processes. If so,
        the last list of processes may lack one.

        Return False if the kernel's count cannot be used.
        """
        return self._is_counted and self._pools.is_settled and not self.is_alone()


def keep_house(run_id: int, mounts: Mounts, *, since_ns: int | None = None) -> Housekeeper:
    """Start a housekeeper, wait until it has ended, and return what it achieved. It sends all files
    to the host and empties the mounts. If the mounts are already empty, no housekeeper is started.

    If `since_ns` is given, a housekeeper is always started. It only sends the figures and the files
    that have changed since that time, and removes only the figures.
    """
    if since_ns is None and mounts.are_clean():
        return NOTHING_DONE
    readable, writable = os.pipe()
    try:
        pid = processes.fork()
    except OSError as error:
        os.close(readable)
        os.close(writable)
        return Housekeeper(1, f"no housekeeper could be made: {error.strerror}")
    if pid == 0:
        _hand_over(run_id, mounts, writable, since_ns)
    os.close(writable)
    with held(readable):
        return _await_housekeeper(pid, readable)


def _hand_over(run_id: int, mounts: Mounts, report_fd: int, since_ns: int | None) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        os.closerange(3, report_fd)
        os.closerange(report_fd + 1, 1024)
        become_user()
        places = mounts.emptied if since_ns is None else mounts.paths
        left_out = workspace.keep_house(run_id, _tell, places, since_ns)
        os.write(report_fd, left_out.to_bytes(LEFT_OUT_BYTES, "big"))
        status = 0
    except BaseException as fault:
        os.write(2, f"housekeeper: {type(fault).__name__}: {fault}\n".encode()[:400])
    finally:
        os._exit(status)


def _await_housekeeper(pid: int, readable: int) -> Housekeeper:
    """Wait until the housekeeper `pid` reports or ends, and return what it achieved. If it takes
    too long, kill it.

    `readable` is the descriptor on which it reports.
    """
    idle_looks, used_ns = 0, 0
    while not select.select([readable], [], [], 1.0)[0]:
        before_ns, used_ns = used_ns, kernel.process_cpu_ns(pid) or 0
        idle_looks += used_ns == before_ns and not processes.works(pid)
        if idle_looks > HOUSEKEEPER_LOOKS or used_ns > HOUSEKEEPER_CPU_S * 1e9:
            processes.send(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Housekeeper(1, "the workspace could not be read in time")
    report = os.read(readable, LEFT_OUT_BYTES)
    os.waitpid(pid, 0)
    if len(report) < LEFT_OUT_BYTES:
        return Housekeeper(1, "the workspace could not be emptied")
    return Housekeeper(left_out=int.from_bytes(report, "big"))


def _tell(message: dict[str, Any]) -> None:
    write_all(1, framing.encode(message))
