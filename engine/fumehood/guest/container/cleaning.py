"""Cleaning: after a run nothing of it is alive, and the container is as it was, or it is said.

Guest side, used by the supervisor. In a session the processes that keep its variables stay,
stopped, and so do its files.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fumehood.guest.container import housekeeping, processes, workspace
from fumehood.guest.container.chain import Chain
from fumehood.guest.container.counters import Counters
from fumehood.guest.container.prefork_pool import PreforkPools
from fumehood.guest.container.run import Run
from fumehood.guest.container.workspace import Mounts, message_queues

KILL_DEADLINE_S = 2.0


class Cleaner:
    """Ends what a program started, and looks whether anything of it is left."""

    def __init__(
        self,
        nurseries: PreforkPools,
        chain: Chain,
        counters: Counters,
        mounts: Mounts,
        reap: Callable[[], None],
    ) -> None:
        self._nurseries = nurseries
        self._chain = chain
        self._counters = counters
        self._mounts = mounts
        self._reap = reap

    def is_alone(self) -> bool:
        """Whether the kernel counts as many processes as are to be here now."""
        if not self._nurseries.is_settled:
            return False
        guests_own = 1 + len(self._nurseries.zygote_pids) + len(self._nurseries.pids)
        expected = guests_own + self._chain.threads()
        counted = self._counters.processes()
        if counted == expected or not self._chain.pids:
            return counted == expected
        return counted == expected + processes.dead_children(self._chain.pids)

    def end_the_rest(self) -> bool:
        """Kill what the program started until none of it is left; False where that fails."""
        if self.is_alone():
            return True
        give_up = time.monotonic() + KILL_DEADLINE_S
        while processes.kill_all(self._chain.pids) or self._is_one_unseen():
            self._reap()
            self._nurseries.hear()  # where memory ran out, a spare child may be dead, too
            if time.monotonic() > give_up:
                return False
            time.sleep(0.0005)  # killed is not yet dead, and dead not yet gone
        self._reap()
        return True

    def is_left_alone(self) -> bool:
        """Whether between two calls nothing is there but the guest and those that wait."""
        return self.is_alone() or not processes.strangers(self._chain.pids)

    def keep_house(self, run: Run, *, is_over: bool) -> housekeeping.Housekeeper:
        """Hand over the files of a run whose processes are gone, and put the mounts in order."""
        if not is_over:
            left_out = int(not self._mounts.are_clean())  # at least
            fault = "a process of the program could not be ended"
            return housekeeping.Housekeeper(left_out, fault)
        if run.child is None:
            return housekeeping.NOTHING_DONE
        if not run.keep:
            return housekeeping.keep_house(run.id, self._mounts)
        # What the owner did with the files, the owner knows.
        if run.program == "files" or not workspace.has_changed(run.since_ns):
            return housekeeping.NOTHING_DONE
        return housekeeping.keep_house(run.id, self._mounts, since_ns=run.since_ns)

    def why_not_clean(self, run: Run, housekeeper: housekeeping.Housekeeper) -> str | None:
        """What a program left that could not be taken away; None where there is nothing."""
        if housekeeper.fault is not None:
            return housekeeper.fault
        if not self.is_alone() and processes.strangers(self._chain.pids):
            return "a process of the program is left"
        if not run.keep:
            are_clean = self._mounts.are_clean()
            if are_clean is False or (are_clean is None and not self._mounts.are_empty()):
                return "a file of the program is left"
        if not self._mounts.are_the_same():
            return "a mount has changed"
        if message_queues():
            return "a message queue of the program is left"
        return None

    def _is_one_unseen(self) -> bool:
        """Whether the kernel counts more than there are to be seen; a list of them takes time."""
        is_counted = self._nurseries.is_settled and self._counters.processes() is not None
        return is_counted and not self.is_alone()
