"""Decide a trial: a human decides whether to apply or drop the effect of a program that has run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import anyio

from fumehood.core.errors import EngineError
from fumehood.executors.outcome import HeldTrial, Outcome
from fumehood.executors.program import TrialDecision
from fumehood.pipeline.child_calls import ChildCalls, RunCall
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.sandbox.session_use import SessionLease


async def decide_trial(
    held: HeldTrial, call: CallContext, services: PipelineServices, run_call: RunCall
) -> Outcome:
    """Request a decision on a trial's effect, apply or drop it, and return the call's outcome."""
    assert call.plan is not None
    decision = TrialDecision(held, call.plan.executor.language)
    try:
        why = await ChildCalls(call, [], services, run_call).ask_about(decision)
        if why is None:
            await decision.over.wait()
    finally:
        if not decision.has_begun:
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await _drop_trial(held, call, services)
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


async def _drop_trial(held: HeldTrial, call: CallContext, services: PipelineServices) -> None:
    plan, request = call.plan, call.request
    assert plan is not None
    assert plan.session is not None
    assert request.principal is not None
    async with services.sessions.lease(
        request.principal, request.options.agent_id, plan.session.id,
        language=plan.executor.language, memory_mb=plan.limits.memory_mb,
    ) as lease:  # fmt: skip
        if isinstance(lease, SessionLease) and lease.trials is not None:
            await lease.trials.drop(held.files)
