"""Trials as a part of one engine: it runs programs as trials, and asks humans to decide about the
effects.

Host side. Invariants: a trial changes neither its session nor another host, unless a human has
approved exactly the effect that was shown; an effect is applied at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio

from fumehood.core.errors import EngineError, ExecutionError
from fumehood.core.long_text import SIDE_BYTES, head_and_tail
from fumehood.engine_part import EnginePart, Kernel
from fumehood.executors.around import Given, HeldBack
from fumehood.executors.base import ToolRun
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.context import CallContext, PipelineServices, RunCall
from fumehood.protocol.canonical import digest_of
from fumehood.trials.decision import HeldTrial, TrialDecision, ask_about
from fumehood.trials.lease import TrialLease, trials_of
from fumehood.trials.options import PREVIEW
from fumehood.trials.session_trials import HeldFiles


class Trials(EnginePart):
    """Holds back the effects of runs until a human has decided about them."""

    holds_back_with: Mapping[str, Any] = {PREVIEW.name: True}

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.waiting: Counter[str] = Counter()
        """Id of a session → the number of effects of its trials that wait for a decision."""

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        """Make the run a trial if its call has the option `preview`.

        For a trial, yield a `Given` with a lease that keeps the effect, and a function that creates
        the outcome after the run. Otherwise, yield None. `before`, the contributions of earlier
        parts, is ignored.
        """
        if not PREVIEW.of(run.request.options):
            yield None
            return
        lease = TrialLease(run.lease, self.waiting)

        async def conclude(outcome: Outcome, held_back: Sequence[HeldBack]) -> Outcome:
            effect = lease.effect
            if effect is not None and effect.is_empty and not any(one.shown for one in held_back):
                await trials_of(run.lease, self.waiting).drop(effect)
                return outcome
            return _as_trial(outcome, effect, held_back)

        yield Given(lease=lease, holds_back=True, conclude=conclude)

    async def decide(
        self, outcome: Outcome, call: CallContext, services: PipelineServices, run_call: RunCall
    ) -> Outcome:
        """Ask a human to decide about the effect of a trial, and then apply or drop the effect.
        Return the outcome of the trial's call.

        `outcome` is the outcome of the trial itself. `run_call` runs the second call that waits for
        the human's approval.
        """
        held = outcome.held
        assert isinstance(held, HeldTrial)
        assert call.plan is not None
        decision = TrialDecision(held, call.plan.executor.language, self.waiting)
        try:
            why = await ask_about(decision, call, services, run_call)
            if why is None:
                await decision.over.wait()
        finally:
            if not decision.has_begun:
                with anyio.CancelScope(shield=True), suppress(EngineError):
                    await self._drop(held, call, services)
        if isinstance(decision.result, Outcome):
            outcome = decision.result
        else:
            why = decision.result or why
            assert why is not None
            why.details = {**(why.details or {}), **(held.outcome.data or {})}
            outcome = replace(held.outcome, data=None, error=why)
        if call.handle.close():
            outcome = Outcome.cancelled(outcome.isolation)
        return outcome

    async def _drop(self, held: HeldTrial, call: CallContext, services: PipelineServices) -> None:
        plan, request = call.plan, call.request
        assert plan is not None
        assert plan.session is not None
        assert request.principal is not None
        async with services.sessions.lease(
            request.principal, request.options.agent_id, plan.session.id,
            language=plan.executor.language, memory_mb=plan.limits.memory_mb,
        ) as lease:  # fmt: skip
            await trials_of(lease, self.waiting).drop(held.files)


def _as_trial(outcome: Outcome, files: HeldFiles | None, held_back: Sequence[HeldBack]) -> Outcome:
    """Return the outcome of a trial together with the effect that a human must decide about.

    The effect consists of the changes to files and variables in `files`, the program's output, and
    the actions in `held_back`. If `files` is None, the effect could not be held. In this case,
    return an outcome with an error.
    """
    if files is None:
        if outcome.error is not None:
            return outcome
        error = ExecutionError(
            "The program ran, but its effect cannot be held: it made a link or a special file, "
            "left threads, or its files could not be saved. The session's files are as before.",
            details=outcome.data,
        )
        return replace(outcome, data=None, error=error)
    shown = {**files.shown}
    printed = "".join(outcome.data.get(name) or "" for name in ("stdout", "stderr"))
    if printed:
        shown["printed"] = printed if len(printed) <= SIDE_BYTES else head_and_tail(printed)
    for one in held_back:
        shown |= {name: given for name, given in one.shown.items() if name not in shown}
    if files.has_variables:
        shown["variables"] = "as the program leaves them"
    effect = Effect(shown, base=files.token, effect=digest_of(shown))
    return replace(outcome, held=HeldTrial(files, effect, outcome, tuple(held_back)))
