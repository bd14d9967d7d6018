"""The decision on a trial: a human sees the effect of a program that has run, and decides whether
it is applied or dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace

import anyio

from fumehood.core.errors import EngineError, PermissionDenied
from fumehood.core.json_types import JsonObject
from fumehood.executors.around import HeldBack
from fumehood.executors.base import CallHandle, HeldAction, ToolRun
from fumehood.executors.effects import Effect
from fumehood.executors.endings import unsaved_words
from fumehood.executors.outcome import Outcome
from fumehood.executors.program import IN_A_SESSION
from fumehood.pipeline.context import CallContext, PipelineServices, RunCall
from fumehood.trials.lease import trials_of
from fumehood.trials.session_trials import HeldFiles


@dataclass(frozen=True, eq=False, slots=True)
class HeldTrial:
    """A finished trial, and the effect that it would have on its session and on other hosts."""

    files: HeldFiles
    effect: Effect
    outcome: Outcome
    held_back: tuple[HeldBack, ...] = ()
    """The trial's actions that parts have held back."""


class TrialDecision(HeldAction):
    """The held action that applies the effect of a trial once a human has approved it."""

    needs = "trial"
    always_asks = True
    gone = "The effect of this trial is not kept any more. Try it again."
    has_preview = True
    place = IN_A_SESSION

    def __init__(self, trial: HeldTrial, language: str | None, waiting: Counter[str]) -> None:
        super().__init__()
        self._trial = trial
        self._waiting = waiting
        self.language = language
        self.effect = trial.effect

    async def carry_out(self, run: ToolRun) -> Outcome:
        """Apply the changes to files and variables. Then perform the actions that parts have held
        back.
        """
        outcome = replace(self._trial.outcome, isolation="session")
        not_saved = await trials_of(run.lease, self._waiting).put_in(self._trial.files)
        outcome = replace(outcome, warnings=outcome.warnings + unsaved_words(not_saved))
        for one in self._trial.held_back:
            error = await one.apply(run)
            if error is not None:
                error.details = outcome.data
                return replace(outcome, data=None, error=error)
        return outcome


async def ask_about(
    decision: TrialDecision, call: CallContext, services: PipelineServices, run_call: RunCall
) -> EngineError | None:
    """Request approval of a trial's effect. If it is approved, `decision` applies the effect.

    Return None once `decision` has begun to apply the effect. Otherwise, return the error.
    """
    parent = call.request
    chosen = parent.options.wait_for_approval
    # A setting can be an integer, and the option is stored as it is.
    patience_s = float(services.asker.wait_s(True if chosen is None else chosen))
    if patience_s <= 0:
        return PermissionDenied("It needs a human's approval, and its call waits for none.")
    own: JsonObject = {
        "new_call": True, "wait_for_approval": patience_s, "idempotency_key": None,
    }  # fmt: skip
    request = replace(
        parent,
        options=parent.options.model_copy(update=own),
        principal=services.present(parent.principal),
        call_id=f"{parent.call_id}_1",
        parent_id=parent.call_id,
        held=decision,
    )
    handle, given_up = CallHandle(), asyncio.Event()

    def give_up() -> None:
        if handle.cancel():
            given_up.set()

    call.handle.report(0, "the effect of the trial waits for approval")
    timer = asyncio.get_running_loop().call_later(patience_s, give_up)
    asking = asyncio.ensure_future(run_call(request, services, handle))
    try:
        answer = await asyncio.shield(asking)
    except asyncio.CancelledError:
        handle.cancel()  # nobody waits for the decision any more
        with anyio.CancelScope(shield=True):
            await asyncio.wait((asking,))
        raise
    finally:
        timer.cancel()
        decision.withdraw()
    if decision.has_begun:
        return None
    if given_up.is_set():
        return PermissionDenied("Nobody has decided about it in time, so nothing was put in.")
    return PermissionDenied(answer.error.message if answer.error else "It was not put in.")
