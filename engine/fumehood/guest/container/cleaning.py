"""Cleaning: after a run none of its processes is alive and the container is as before, or the host
is notified.

Guest side, used by the supervisor. In a session, the stopped processes that hold its variables
stay, and so do its files. After any other run, a housekeeper hands over the files and removes them:
a short-lived process of the programs' user, forked when no process of the program is left. It
writes its frames into the channel itself; the supervisor waits for it for a bounded time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fumehood.guest.container import processes, workspace
from fumehood.guest.container.chain import Chain
from fumehood.guest.container.meter import Counters
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
"""Processor time until registered processes that come and go all the time are frozen for the
cleaning.
"""
TELL_S = 0.002
"""Seconds for a zygote to tell that it has reaped a process."""

HOUSEKEEPER_CPU_S = 20.0
"""Processor time of a housekeeper."""
HOUSEKEEPER_LOOKS = 20
"""Looks at a housekeeper, a second apart, since which it has used no processor and wants none."""
LEFT_OUT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Housekeeper:
    """A housekeeper's outcome: how many files were left out (at least), and why it failed."""

    left_out: int = 0
    fault: str | None = None


NOTHING_DONE = Housekeeper()


class Cleaner:
    """Kills the processes of a program, and checks that nothing of it is left."""

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
        """Processes that zygotes have reaped since the last look."""

    def on_reaped(self, pid: int) -> None:
        """Note a process that a zygote has reaped."""
        self._reaped.add(pid)

    def is_alone(self) -> bool:
        """Whether the kernel counts exactly the processes that should exist now: the guest's, a
        session's waiting ones, and registered ones.

        In a session, a relay of the next host may have come that is not held yet.
        """
        if not self._is_counted:
            return False
        if not self._registered.pids:
            return self._fits(self._counters.read("processes"), 0)
        # The second time with those that have come since the last look. If their number changes
        # meanwhile, the count is no evidence without a look.
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
        """Whether the kernel's count fits, and whether it is certain that it did at one moment."""
        counted = self._counters.read("processes")
        threads, is_certain = self._trees.count()
        return self._fits(counted, threads, looks=looks), is_certain

    def _fits(self, counted: int | None, registered: int, *, looks: bool = True) -> bool:
        """Whether the kernel's count is that of the guest, of a session's waiting processes, and of
        so many threads of registered ones. `looks` is whether to look for others that may be there.
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
        begun = [pid for pid in others if processes.origin_of(pid) == 0]  # by Docker
        return more == sum(
            processes.threads_of(pid) for pid in begun if not processes.is_stranger(pid)
        )

    def end_the_rest(self) -> bool:
        """Kill the program's processes until none is left. Returns False on failure."""
        self._reaped.clear()
        if not self._registered.pids:
            return self.is_alone() or self._kill_the_rest()
        if self._kill_beside():
            return True
        # They cannot be told from the program's, so they end with it.
        self._registered.kill_all()
        return self._kill_the_rest()

    def _kill_beside(self) -> bool:
        """Kill the program's processes beside registered ones. False if they cannot be told apart
        in time.
        """
        if not (self._is_counted and self._registered.get_orphans):
            return self._kill_uncounted()
        if all(self._count(looks=False)) or self._kill_the_rest(CALM_CPU_S):
            return True
        with self._trees.frozen(self._chain.pids) as freeze:
            return self._kill_the_rest(before_look=freeze)

    def _kill_uncounted(self) -> bool:
        """The same for gVisor, which counts nothing, and hangs up a group that was frozen.

        A process that vanishes during a look may be a registered one, which its parent has reaped.
        One of the program may hide so only if a zygote reaps it, or the kernel does for the waiting
        process of a trial: an orphan is the supervisor's, which reaps none meanwhile, and any other
        parent is seen itself. Zygotes tell what they reap, a moment later; so two looks must agree.
        """
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
            if not self._trees.kill_all(self._chain.pids) and not self._is_one_unseen():
                break
            self._reap()
            self._pools.receive()  # where memory ran out, a spare child may be dead, too
            if not patience.rest():
                return False
        self._reap()
        return True

    def is_left_alone(self) -> bool:
        """Whether only the guest, a session's waiting processes and registered ones exist."""
        for _ in range(2):  # one that vanished during the first look may be Docker's
            if self.is_alone():
                return True
            if self._pools.is_settled and self._trees.intruders():
                return False
            if not self._trees.strangers(self._chain.pids):
                return True
        # Otherwise it may be a registered one.
        return bool(self._registered.pids) and self._kill_beside()

    def keep_house(self, run: Run, *, is_over: bool) -> Housekeeper:
        """Hand over the files of a run whose processes are gone, and put the mounts in order."""
        if not is_over:
            left_out = int(not self._mounts.are_clean())  # at least
            fault = "a process of the program could not be ended"
            return Housekeeper(left_out, fault)
        if run.child is None or run.is_left:
            return NOTHING_DONE
        if not run.keep:
            return keep_house(run.id, self._mounts)
        # The owner knows which files it has changed.
        is_quiet = run.program == "files" or (run.quiet and not workspace.has_figures())
        if is_quiet or not workspace.has_changed(run.since_ns):
            return NOTHING_DONE
        return keep_house(run.id, self._mounts, since_ns=run.since_ns)

    def why_not_clean(self, run: Run, housekeeper: Housekeeper) -> str | None:
        """The reason why the container is not clean, or None if it is."""
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
        """Whether the kernel counts more processes than were found: listing them takes time."""
        return self._is_counted and self._pools.is_settled and not self.is_alone()


def keep_house(run_id: int, mounts: Mounts, *, since_ns: int | None = None) -> Housekeeper:
    """Hand over files and empty the mounts, if they contain anything.

    With `since_ns`, only files changed since then are handed over, and all stay in place.
    """
    if since_ns is None and mounts.are_clean():
        return NOTHING_DONE
    readable, writable = os.pipe()
    try:
        pid = os.fork()
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
    """Wait for its report, which it writes at once, or its end, at which its pipe closes."""
    idle_looks, used_ns = 0, 0
    while not select.select([readable], [], [], 1.0)[0]:
        before_ns, used_ns = used_ns, kernel.process_cpu_ns(pid) or 0
        idle_looks += used_ns == before_ns and not processes.works(pid)
        if idle_looks > HOUSEKEEPER_LOOKS or used_ns > HOUSEKEEPER_CPU_S * 1e9:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Housekeeper(1, "the workspace could not be read in time")
    report = os.read(readable, LEFT_OUT_BYTES)
    os.waitpid(pid, 0)
    if len(report) < LEFT_OUT_BYTES:
        return Housekeeper(1, "the workspace could not be emptied")
    return Housekeeper(left_out=int.from_bytes(report, "big"))


def _tell(message: dict[str, Any]) -> None:
    write_all(1, framing.encode(message))
