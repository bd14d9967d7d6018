"""Admit and execute: give a call a place where its limits are enforced, and run its tool there.

The sixth stage, `admit`, is a context manager. It takes an `ApprovedCall` and yields an
`AdmittedCall`, which holds a place behind the wall that its plan (`plan.py`) names. Only `admit`
creates an `AdmittedCall`. The seventh stage, `execute`, takes the `AdmittedCall` and returns the
`Outcome` of the last attempt. A failed program also has an outcome, because the envelope reports
the resources that the call used. `retry` decides whether another attempt follows. Each attempt
needs a permit from the circuit of the tool's service.

`dry_run` takes a `PermittedCall` and describes what would happen and why. As for a real call,
invalid requests are refused before this.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio

from fumehood.circuits.breaker import Circuit, Permit
from fumehood.core.errors import (
    CircuitOpen,
    EndedBy,
    EngineError,
    InternalError,
    RequiresHumanApproval,
    ShuttingDown,
    code_of,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import WallLimits, smallest
from fumehood.core.usage import money
from fumehood.executors.around import needs_of
from fumehood.executors.base import ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.executors.program import ProgramExecutor
from fumehood.pipeline.approve import ApprovedCall
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.context import CallContext, PipelineServices, RunCall
from fumehood.pipeline.pass_gates import refuses
from fumehood.pipeline.plan import Plan, plan_now
from fumehood.pipeline.program_calls import CallsOfProgram
from fumehood.pipeline.result import shortened
from fumehood.pipeline.retry import CIRCUIT_OPENED, may_retry, most_retries
from fumehood.policy.model import Verdict
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Lease


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that holds its place behind a wall."""

    permitted: PermittedCall
    plan: Plan
    lease: Lease
    expected: str | None = None
    """The workspace state (`Effect.base`) for which a human approved the effect. The call fails if
    the state has changed since."""
    must_hold_back: bool = False
    """Whether a part must hold back the program's effect, because the call lacks the required
    consent."""
    permit: Permit | None = None
    """The circuit's permit for the first request to the tool's service. None if the tool has no
    service."""


async def plan_admission(
    approved: ApprovedCall, services: PipelineServices
) -> AbstractAsyncContextManager[AdmittedCall]:
    """Plan where a call runs. Return the context manager `admit` for this plan, which waits for a
    free place when it is entered.

    Raises:
        ShuttingDown: the engine accepts no new calls.
        CircuitOpen: requests to the tool's service are suspended.
        SandboxUnavailable, InvalidParams, ResourceNotFound: for the same reasons as in `plan_now`.
    """
    if services.is_draining():
        raise ShuttingDown(
            "The engine is stopping or not started. Repeat the call when it runs again.",
            retry_after_ms=2000,
        )
    plan = await plan_now(approved.permitted, services.walls, services.sessions)
    circuit = services.circuits.of(plan.upstream) if plan.upstream is not None else None
    if circuit is not None:  # `admit` checks the circuit again once the call has its place
        circuit.require_passable()
    return admit(approved, plan, services.sessions, circuit)


@asynccontextmanager
async def admit(
    approved: ApprovedCall, plan: Plan, sessions: SessionKeeper, circuit: Circuit | None
) -> AsyncIterator[AdmittedCall]:
    """Wait a limited time for a place behind the wall, and hold this place during the block.

    Raises:
        CircuitOpen: requests to the tool's service are suspended.
        SandboxUnavailable: no place became free in time.
        InvalidParams, ResourceNotFound: for the same reasons as in `make_plan`.
    """
    expected = approved.consent.expected if approved.consent is not None else None
    async with _lease(approved.permitted, plan, sessions) as lease:
        permit = circuit.enter() if circuit is not None else None
        try:
            yield AdmittedCall(
                approved.permitted, plan, lease, expected, approved.needs_consent, permit
            )
        finally:
            if permit is not None:
                permit.give_back()


def _lease(
    permitted: PermittedCall, plan: Plan, sessions: SessionKeeper
) -> AbstractAsyncContextManager[Lease]:
    """Return a lease of the session's container if the call runs there. Otherwise, return a lease
    of the wall that the plan names.
    """
    options, memory_mb = permitted.request.options, plan.limits.memory_mb
    if plan.placement.is_of_session and plan.session is not None:
        return sessions.lease(
            permitted.principal,
            options.agent_id,
            plan.session.id,
            language=plan.executor.language,
            memory_mb=memory_mb,
            least_grade=plan.limits.least_grade,
        )
    return plan.wall.lease(
        permitted.trust_domain,
        fresh=plan.placement.needs_fresh_place(options.isolation),
        memory_mb=memory_mb,
        image=plan.image,
    )


async def execute(
    admitted: AdmittedCall, *, call: CallContext, services: PipelineServices, run_call: RunCall
) -> Outcome:
    """Run the call in its tool's executor. If the run fails, repeat it as long as the rules in
    `pipeline/retry.py` allow another attempt.

    Return the outcome of the last attempt. Parts use `run_call`, the pipeline's entry, to make
    calls for the running program.
    """
    permitted = admitted.permitted
    if admitted.must_hold_back and not isinstance(admitted.plan.executor, ProgramExecutor):
        raise InternalError("Only the effects of programs can be held back. Nothing ran.")
    needs = needs_of(permitted.tool.definition, permitted.arguments, admitted.plan.network)
    run = ToolRun(
        tool=permitted.tool,
        arguments=permitted.arguments,
        limits=admitted.plan.limits,
        lease=admitted.lease,
        domain=permitted.trust_domain,
        handle=call.handle,
        blobs=services.stores.blobs,
        cursors=services.cursors,
        redactor=services.redactor,
        request=permitted.request,
        network=admitted.plan.network,
        expected=admitted.expected,
        calls=CallsOfProgram(call, services, run_call) if needs else None,
        around=services.parts.around,
        parts=services.parts.all,
        must_hold_back=admitted.must_hold_back,
    )
    tool = permitted.tool.definition
    if tool.retry_count == 0 or not may_retry(tool, permitted.request.options):
        return await _attempt(run, admitted.permit, admitted.plan)
    return await _attempts(run, admitted, call, services)


async def _attempts(
    run: ToolRun, admitted: AdmittedCall, call: CallContext, services: PipelineServices
) -> Outcome:
    """Repeat a run until an attempt succeeds, or until no further attempt is allowed, useful or
    possible in the remaining time. Return the outcome of the last attempt.
    """
    tool, clock, retries = run.tool.definition, services.clock, services.retries
    circuit = services.circuits.of(admitted.plan.upstream)
    deadline = clock.monotonic() + run.limits.wall_s
    retries.begin(tool)
    outcome = await _attempt(run, admitted.permit, admitted.plan)
    while (error := outcome.error) is not None and not call.handle.is_cancelled:
        if call.handle.has_output:  # listeners would receive the same output again
            break
        left_s = deadline - clock.monotonic()
        delay_s = retries.next_delay_s(tool, error, call.attempts, left_s)
        if delay_s is None:
            break
        suspended_ms = circuit.wait_ms() if circuit is not None else 0
        if suspended_ms > delay_s * 1e3:  # this attempt may have opened the circuit
            _stop(error, suspended_ms, call)
            break
        _tell(error, delay_s, most_retries(tool, error), call)
        await anyio.sleep(delay_s)
        try:
            permit = circuit.enter() if circuit is not None else None
        except CircuitOpen as suspended:
            _stop(error, suspended.retry_after_ms or 0, call)
            break
        call.attempts.retry_count += 1
        rest = _with_time(run, deadline - clock.monotonic())
        outcome = _summed(outcome, await _attempt(rest, permit, admitted.plan))
    return outcome


def _stop(error: EngineError, suspended_ms: int, call: CallContext) -> None:
    """Record that requests to the service are suspended for `suspended_ms` milliseconds. Add a
    warning to the call, and set the retry delay of `error` to at least this time.
    """
    call.attempts.warning = CIRCUIT_OPENED
    error.retry_after_ms = max(error.retry_after_ms or 0, suspended_ms)


async def _attempt(run: ToolRun, permit: Permit | None, plan: Plan) -> Outcome:
    if permit is None:
        return await plan.executor.run(run)
    was_hurried = _is_hurried(run, plan.wall.limits)
    with permit:
        try:
            outcome = await plan.executor.run(run)
        except EngineError as error:
            permit.conclude(error, was_hurried=was_hurried)
            raise
        permit.conclude(outcome.error, was_hurried=was_hurried)
        return outcome


def _is_hurried(run: ToolRun, offered: WallLimits) -> bool:
    """Whether the run has less time than its tool normally gets, because the caller set a lower
    limit or earlier attempts used some of the time.
    """
    tool = run.tool.definition
    request_s = tool.timeout / 1000 if tool.timeout is not None else math.inf
    given_s = smallest(offered.default_wall_s, offered.max_wall_s, tool.timeout_seconds)
    return run.limits.wall_s < min(request_s, given_s)


def _tell(error: EngineError, delay_s: float, max_retries: int, call: CallContext) -> None:
    """Log the failure of an attempt, and report the coming retry to the call's listeners."""
    number = call.attempts.retry_count + 1
    code = code_of(error)
    call.trace.tell("call.retrying", retry=number, code=code, delay_ms=round(delay_s * 1e3, 3))
    call.handle.retrying(number, max_retries, error)


def _with_time(run: ToolRun, left_s: float) -> ToolRun:
    """Return the run with its time limit lowered to `left_s`. If no time is left, the limit is 1
    ms.
    """
    wall_s = max(left_s, 0.001)
    limits = replace(run.limits, wall_s=wall_s, cpu_s=min(run.limits.cpu_s, wall_s))
    return replace(run, limits=limits)


def _summed(before: Outcome, last: Outcome) -> Outcome:
    """Return the outcome `last` with the CPU and network time of both outcomes added up."""
    cpu_ms = last.cpu_ms if before.cpu_ms is None else before.cpu_ms + (last.cpu_ms or 0.0)
    return replace(last, cpu_ms=cpu_ms, network_ms=before.network_ms + last.network_ms)


# -- dry runs -------------------------------------------------------------------------------


async def dry_run(permitted: PermittedCall, services: PipelineServices) -> Outcome:
    """Return an outcome that describes what the call would do, without doing it."""
    tool = permitted.tool.definition
    excesses = dict(services.parts.excesses(permitted.validated))
    decision = permitted.decision
    asks = decision.verdict is Verdict.ASK
    refused = [excess.error.code for gate, excess in excesses.items() if refuses(gate, decision)]
    refusal: str | None = next(iter(refused), RequiresHumanApproval.code if asks else None)
    plan: JsonObject = {"placement": None, "limits": None, "session": None}
    try:
        made = await plan_now(permitted, services.walls, services.sessions)
        plan = {
            "placement": {
                "kind": made.placement.kind,
                "why": made.placement.why,
                **({"image": made.image} if made.image is not None else {}),
            },
            "limits": {
                "timeout_seconds": made.limits.wall_s,
                "memory_mb": made.limits.memory_mb,
                "output_bytes": made.limits.output_bytes,
                "enforced": sorted(made.wall.status.enforced),
            },
            "session": _session(made),
        }
        circuit = services.circuits.of(made.upstream)
        if circuit is not None:
            circuit.require_passable()
    except EngineError as error:
        refusal = refusal or error.code
        if plan["placement"] is None:
            plan["placement"] = {"kind": None, "why": error.message}
    answer: dict[str, Any] = {
        "dry_run": True,
        "would_run": refusal is None,
        "refused_with": refusal,
        **plan,
        "approval": {
            "required": asks,
            **({"approvers": list(decision.approvers), "quorum": decision.quorum} if asks else {}),
        },
        "policy": {
            "rule": decision.rule,
            "reason": decision.reason,
            "version": decision.policy_version,
        },
        **{
            gate.name: excesses[gate].shown if gate in excesses else None
            for gate in reversed(services.parts.gates)
            if gate.name is not None
        },
        "requires_auth": tool.requires_auth,
        "cost": {"per_use": money(tool.cost_per_use)},
        "arguments": shortened(permitted.validated.shown_arguments),
    }
    return Outcome(EndedBy.OK, "none", data=answer, is_dry_run=True)


def _session(plan: Plan) -> JsonObject | None:
    if plan.session is None:
        return None
    shown = plan.session.model_dump(mode="json", include={"id", "image", "expires_at", "is_busy"})
    return {**shown, "runs_in_it": plan.placement.is_of_session}
