"""The trees of registered processes, which survive the end of a call.

Guest side, used by the supervisor and by keepers. A registered process has the same user as the
programs of calls, so only the kernel's word tells them apart: its chain of parents reaches its
keeper, a process of root to which the kernel gives the orphans below it. Invariants: nothing that
a program chooses (name, group, session, files) counts; a process whose chain cannot be read, for
example because it vanished meanwhile, is not spared.

What belongs to a tree belongs to it for ever, so those that were found are not looked up again:
their status files stay open, and such a file never shows another process with the same id.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fumehood.guest.container import processes
from fumehood.guest.core import kernel
from fumehood.guest.core.children import status

MAX_CLIMBS = 5
"""Tries to climb from a process to its keeper, if its ancestors end meanwhile."""

STAT_BYTES = 1024
THREADS_FIELD = 17
"""Place of the number of threads after the name. *Source*: proc_pid_stat(5), num_threads."""

END_PAUSE_S = 0.001

MAX_LOOKS = 200
"""Looks for new processes of a tree before it is killed: some could let others continue for ever.
"""


@dataclass(eq=False)
class _Known:
    """A process that was found below a keeper."""

    descriptor: int
    """Its open status file."""
    threads: int = 0
    cpu_ns: int | None = None
    """CPU time at the last count, of one with several threads."""


class Trees:
    """All processes below the keepers, whose process ids `keepers` returns; `own` returns those of
    the guest's other processes.
    """

    def __init__(
        self,
        keepers: Callable[[], Collection[int]],
        own: Callable[[], Collection[int]],
        *,
        cached: bool,
    ) -> None:
        """With `cached`, processes that were found are not looked up again."""
        self._keepers = keepers
        self._own = own
        self._is_cached = cached
        self._known: dict[int, _Known] = {}

    def count(self) -> tuple[int, bool]:
        """Number of threads of the known processes, and whether it was the same at every moment
        since the last count. Those that are gone are forgotten.

        A process that is there now was there before; a thread does not come or go while its process
        uses no CPU time.
        """
        count, is_same = 0, True
        for pid, known in list(self._known.items()):
            try:
                shown = os.pread(known.descriptor, STAT_BYTES, 0).rpartition(b")")[2].split()
                threads = int(shown[THREADS_FIELD])
            except (OSError, IndexError):
                os.close(known.descriptor)
                del self._known[pid]
                is_same = False
                continue
            cpu_ns = kernel.process_cpu_ns(pid) if threads > 1 else None
            is_same = is_same and (threads, cpu_ns) == (known.threads, known.cpu_ns)
            known.threads, known.cpu_ns = threads, cpu_ns
            count += threads
        return count, is_same

    def strangers(self, spared: Collection[int] = ()) -> list[int]:
        """As `processes.strangers`, without those below a keeper."""
        if not self._keepers():
            return processes.strangers(spared)
        return self._look(spared)[0]

    def intruders(self) -> list[int]:
        """Process ids of root's processes that neither the guest nor Docker has started. Looked up
        while no child of a zygote is on its way.
        """
        keepers = self._keepers()
        found = [
            pid
            for pid in set(processes.all_pids()) - {*keepers, *self._own()}
            if not processes.is_stranger(pid) and processes.origin_of(pid) == 1
        ]
        return [pid for pid in found if not self._is_below(pid, keepers, ())] if keepers else found

    def kill_all(self, spared: Collection[int] = ()) -> int:
        """Send SIGKILL to each of them once. Returns their number."""
        return processes.kill(self.strangers(spared))

    def kill_living(self, spared: Collection[int]) -> int:
        """Kill the same, and return the number of those that were still there to be killed: others
        that come and go would be counted for ever.
        """
        return sum(processes.kill([pid]) for pid in self.strangers(spared) if status(pid))

    @contextmanager
    def frozen(self, spared: Collection[int]) -> Iterator[Callable[[], None]]:
        """Let the block stop all processes below keepers, each time that it calls the function that
        it gets. Afterwards those that were not stopped before continue. Without `cached` it stops
        none: gVisor hangs up a group that was stopped.
        """
        seen: set[int] = set()
        stopped: set[int] = set()

        def stop() -> None:
            for pid in self._look(spared)[1] if self._is_cached else ():
                if not processes.is_stopped(pid):
                    if pid not in seen:
                        stopped.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                seen.add(pid)

        try:
            yield stop
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def forget(self) -> None:
        """Look all processes up again: a keeper is gone, and those below it have no other."""
        for known in self._known.values():
            os.close(known.descriptor)
        self._known.clear()

    def _look(self, spared: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the strangers, and the processes below keepers."""
        self.count()  # a process id counts only while its file says that it is the same process
        keepers = self._keepers()
        kept = set(self._known)
        skipped = {*spared, *kept, *keepers, *self._own()}
        strangers = []
        for pid in processes.all_pids():
            if pid in skipped or not processes.is_stranger(pid):
                continue
            if self._is_below(pid, keepers, kept):
                kept.add(pid)
                self._remember(pid)
            elif not (spared and processes.is_dead_child(pid, spared)):
                strangers.append(pid)
        return strangers, sorted(kept)

    def _remember(self, pid: int) -> None:
        if self._is_cached:
            with suppress(OSError):  # it is gone; or there are too many, and it is looked up again
                self._known[pid] = _Known(os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))

    def _is_below(self, pid: int, keepers: Collection[int], kept: Collection[int]) -> bool:
        for _ in range(MAX_CLIMBS):
            current: int | None = pid
            while current is not None and current > 1:
                current = processes.parent_of(current)
                if current in keepers or current in kept:
                    return True
            if current is not None:
                return False
            # It is gone, or an ancestor is, so there is another one now.
        return False


def below(root: int) -> set[int]:
    """All processes below one, without itself. One whose parent ends meanwhile may be missing."""
    children: dict[int, list[int]] = {}
    for pid in processes.all_pids():
        parent = processes.parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(new)
        waiting += new
    return found


def _kill_below(root: int) -> int:
    """Send SIGKILL to all processes below one. Returns their number.

    Each is stopped before the next look, so none goes on forking while the others are killed.
    """
    found: set[int] = set()
    for _ in range(MAX_LOOKS):
        new = below(root) - found
        if not new:
            break
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        found |= new
    return processes.kill(sorted(found))


def end_below(root: int, reap: Callable[[], object]) -> None:
    """Kill all processes below one until there is none."""
    while _kill_below(root):
        reap()
        time.sleep(END_PAUSE_S)  # killed is not yet dead, and dead not yet gone
