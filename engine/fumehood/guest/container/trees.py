"""The trees of registered processes, which survive the end of a call.

Guest side, used by the supervisor and by keepers. A registered process runs as the same user as the
programs of calls, so only information from the operating system tells them apart: among the
ancestors of a registered process is its keeper, a root process that becomes the parent of all
orphans below it. Invariants: nothing that a program chooses (name, group, session, files) counts;
if the ancestors of a process cannot be read, for example because it vanished meanwhile, the process
is not spared.

A process never leaves its tree. So the ancestors of a process that was found once are not searched
again. The stat file of such a process stays open, and never shows another process with the same id.
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
"""Maximum number of attempts to follow the ancestors of a process up to its keeper. An attempt
fails if an ancestor ends meanwhile.
"""

STAT_BYTES = 1024
THREADS_FIELD = 17
"""Index of the number of threads in a stat file, among the fields that follow the name. *Source*:
proc_pid_stat(5), num_threads.
"""

END_PAUSE_S = 0.001

MAX_LOOKS = 200
"""Maximum number of searches for new processes of a tree before the tree is killed. Without this
limit, processes that resume each other could prevent the kill for ever.
"""


@dataclass(eq=False)
class _Known:
    """A process that was found below a keeper."""

    descriptor: int
    """The descriptor of the process's open stat file."""
    threads: int = 0
    cpu_ns: int | None = None
    """CPU time in nanoseconds at the last count, or None if the process has a single thread."""


class Trees:
    """Finds all processes below the keepers, and all processes of programs that are not below a
    keeper.
    """

    def __init__(
        self,
        keepers: Callable[[], Collection[int]],
        own: Callable[[], Collection[int]],
        *,
        cached: bool,
    ) -> None:
        """`keepers` returns the process ids of the keepers, and `own` those of the guest's other
        processes. If `cached` is True, each process that was found below a keeper is remembered, so
        its ancestors are searched only once.
        """
        self._keepers = keepers
        self._own = own
        self._is_cached = cached
        self._known: dict[int, _Known] = {}

    def count(self) -> tuple[int, bool]:
        """Count the threads of all remembered processes below keepers. Forget processes that are
        gone.

        Return the number of threads, and whether this number is certainly the same as at the last
        count. It is certain only if no process is new or gone, and no thread count has changed. In
        addition, no process with several threads may have used CPU time.
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
            # A process that uses no CPU time neither starts nor ends a thread.
            cpu_ns = kernel.process_cpu_ns(pid) if threads > 1 else None
            is_same = is_same and (threads, cpu_ns) == (known.threads, known.cpu_ns)
            known.threads, known.cpu_ns = threads, cpu_ns
            count += threads
        return count, is_same

    def strangers(self, spared: Collection[int] = ()) -> list[int]:
        """Return the ids of all processes that do not run as root, except those that must be left
        alone. These are the processes below keepers, the processes in `spared`, and dead children
        of processes in `spared`. A process that vanishes during the search is included.
        """
        if not self._keepers():
            return processes.strangers(spared)
        return self._look(spared)[0]

    def intruders(self) -> list[int]:
        """Return the ids of processes that run as root, but were started neither by the guest nor
        by Docker. Call this only while no zygote is forking a child.
        """
        keepers = self._keepers()
        found = [
            pid
            for pid in set(processes.all_pids()) - {*keepers, *self._own()}
            if not processes.is_stranger(pid) and processes.origin_of(pid) == 1
        ]
        return [pid for pid in found if not self._is_below(pid, keepers, ())] if keepers else found

    def kill_all(self, spared: Collection[int] = ()) -> int:
        """Send SIGKILL to all processes whose ids `strangers` returns. Return the number of these
        processes.
        """
        return processes.kill(self.strangers(spared))

    def kill_living(self, spared: Collection[int]) -> int:
        """Send SIGKILL to those processes found by `strangers` that still exist. Return their
        number. `spared` has the same meaning as in `strangers`.
        """
        # `kill_all` also counts vanished processes. So while registered processes start and end all
        # the time, only this number becomes 0.
        return sum(processes.kill([pid]) for pid in self.strangers(spared) if status(pid))

    @contextmanager
    def frozen(self, spared: Collection[int]) -> Iterator[Callable[[], None]]:
        """Yield a function that suspends all processes below keepers (SIGSTOP). It can be called
        several times. When the block is left, resume the processes that the function has suspended.
        The processes in `spared` are not touched.

        If this object was created with `cached` False, the function does nothing.
        """
        seen: set[int] = set()
        stopped: set[int] = set()

        def stop() -> None:
            # Nothing is cached on gVisor, which sends SIGHUP to process groups that were stopped.
            for pid in self._look(spared)[1] if self._is_cached else ():
                if not processes.is_stopped(pid):
                    if pid not in seen:
                        stopped.add(pid)
                    with suppress(ProcessLookupError):
                        processes.send(pid, signal.SIGSTOP)
                seen.add(pid)

        try:
            yield stop
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    processes.send(pid, signal.SIGCONT)

    def forget(self) -> None:
        """Forget all remembered processes below keepers. Must be called when a keeper is gone,
        because the processes that were below it are no longer below a keeper.
        """
        for known in self._known.values():
            os.close(known.descriptor)
        self._known.clear()

    def _look(self, spared: Collection[int]) -> tuple[list[int], list[int]]:
        """Return two lists of process ids: those that `strangers` returns, and those of the
        processes below keepers.
        """
        self.count()  # forgets processes that are gone, whose ids may be used again
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
            with suppress(OSError):  # the process is gone, or there are too many open files
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
            # The process or an ancestor is gone, so parents have changed: try again.
        return False


def below(root: int) -> set[int]:
    """Return the ids of all descendants of the process `root`. If the parent of a descendant ends
    during the search, this descendant may be missing.
    """
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
    """Send SIGKILL to all descendants of the process `root`, and return their number.

    First, search for descendants and stop them until a search finds no new descendant, so that none
    can fork while the others are killed. After `MAX_LOOKS` searches, kill those found so far.
    """
    found: set[int] = set()
    for _ in range(MAX_LOOKS):
        new = below(root) - found
        if not new:
            break
        for pid in new:
            with suppress(ProcessLookupError):
                processes.send(pid, signal.SIGSTOP)
        found |= new
    return processes.kill(sorted(found))


def end_below(root: int, reap: Callable[[], object]) -> None:
    """Kill all descendants of the process `root`, then call `reap`. Repeat this until no descendant
    is left.
    """
    while _kill_below(root):
        reap()
        time.sleep(END_PAUSE_S)  # a killed process takes time to die and to be reaped
