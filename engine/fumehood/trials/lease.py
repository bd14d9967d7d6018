"""The lease of a trial. It runs a program in the session as a trial, and keeps the effect until a
human decides about it.
"""

from __future__ import annotations

from collections import Counter

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.sandbox.session_use import SessionLease
from fumehood.sandbox.wall import NO_SINKS, Lease, RunEnding, RunSinks
from fumehood.trials.session_trials import HeldFiles, SessionTrials


class TrialLease:
    """Runs a program in the session of `lease` as a trial, and keeps the effect in the attribute
    `effect`.

    `waiting` counts, for each session, the effects that wait for a decision.
    """

    def __init__(self, lease: Lease, waiting: Counter[str]) -> None:
        self.queue_ms = lease.queue_ms
        self._lease = lease
        self._waiting = waiting
        self.effect: HeldFiles | None = None

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        """Run the program as a trial, and return how the run ended. Raises the same errors as
        `SessionTrials.run`.
        """
        trials = trials_of(self._lease, self._waiting)
        ending, self.effect = await trials.run(program, arguments, limits, sinks)
        return ending


def trials_of(lease: Lease, waiting: Counter[str]) -> SessionTrials:
    """Return the object that runs trials in the session of `lease`. `waiting` counts, for each
    session, the effects that wait for a decision.

    Raises SandboxUnavailable if the session is not durable.
    """
    if isinstance(lease, SessionLease) and lease.session.copy is not None:
        from fumehood.durable.saver import SessionSaver  # the part without which none is durable

        copies = lease.part(SessionSaver)
        if copies is not None:
            return SessionTrials(lease, copies, waiting)
    raise SandboxUnavailable("This session has no saved files.", retryable=False)
