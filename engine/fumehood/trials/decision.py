"""The decision about a trial: a human sees the effect that the trial's program had, and decides
whether to apply or drop it.
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
    """What a finished trial would change in its session and on other hosts, and the trial's
    outcome. The changes have not been made yet.
    """

    files: HeldFiles
    effect: Effect
    outcome: Outcome
    held_back: tuple[HeldBack, ...] = ()
    """The actions of the trial that parts of the engine have held back, such as network
    requests.
    """


class TrialDecision(HeldAction):
    """The action that applies the effect of a trial. It is carried out only after a human has
    approved the trial.
    """

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
        """Apply the effect: first the changes to files and variables, then the actions that parts
        of the engine have held back. Return the outcome of the trial's call. If an action fails,
        the outcome has its error.
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
    """Ask a human to approve the effect of a trial. To this end, run a second call, which needs the
    approval, and wait for its answer.

    `run_call` runs the second call. If the human approves, the second call applies the effect with
    `decision`.

    Return None if `decision` has begun to apply the effect. Otherwise, return an error with the
    reason why not.
    """
    parent = call.request
    chosen = parent.options.wait_for_approval
    # The setting can be an integer. Options are stored as given, so it is converted to a float.
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
