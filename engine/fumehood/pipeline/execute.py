"""Execute: run the tool in its place, and again if its service failed and a repeat is harmless.

Seventh stage. Takes an `AdmittedCall` (which only `admit` creates), returns the `Outcome` of the
last attempt, even of a failed program, because its envelope also reports what the call used.
`retry` decides whether another attempt follows. Each attempt needs a permit from the circuit of the
tool's service.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fumehood.circuits.breaker import Permit
from fumehood.core.errors import ApprovalExpired, CircuitOpen, EngineError, code_of
from fumehood.core.limits import WallLimits, smallest
from fumehood.executors.base import ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.admit import AdmittedCall
from fumehood.pipeline.child_calls import ChildCalls, RunCall
from fumehood.pipeline.context import CallContext
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.retry import CIRCUIT_OPENED, may_retry, most_retries
from fumehood.pipeline.services import PipelineServices


async def execute(
    admitted: AdmittedCall, *, call: CallContext, services: PipelineServices, run_call: RunCall
) -> Outcome:
    """Run the call in its tool's executor, and again as often as `retry` allows.

    `run_call` is the pipeline's entry, for the calls that a program makes.
    """
    permitted, tools = admitted.permitted, call.tools
    has_calls = tools is not None or admitted.plan.network
    held = services.trials.pop(permitted.request.call_id, None)
    if held is None and permitted.request.is_decision_on_trial:
        raise ApprovalExpired("The effect of this trial is not kept any more. Try it again.")
    run = ToolRun(
        tool=permitted.tool,
        arguments=permitted.arguments,
        limits=admitted.plan.limits,
        lease=admitted.lease,
        domain=permitted.trust_domain,
        handle=call.handle,
        blobs=services.blobs,
        cursors=services.cursors,
        redactor=services.redactor,
        upstreams=services.upstreams,
        request=permitted.request,
        network=admitted.plan.network,
        expected=admitted.expected,
        held=held,
        calls=ChildCalls(call, tools or [], services, run_call) if has_calls else None,
    )
    tool = permitted.tool.definition
    if tool.retry_count == 0 or not may_retry(tool, permitted.request.options):
        return await _attempt(run, admitted.permit, admitted.plan)
    return await _attempts(run, admitted, call, services)


async def _attempts(
    run: ToolRun, admitted: AdmittedCall, call: CallContext, services: PipelineServices
) -> Outcome:
    """Run attempts until one succeeds or no further one is allowed."""
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
        await retries.sleep(delay_s)
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
    """Record that calls to the service are suspended, and for how long."""
    call.attempts.warning = CIRCUIT_OPENED
    error.retry_after_ms = max(error.retry_after_ms or 0, suspended_ms)


async def _attempt(run: ToolRun, permit: Permit | None, plan: Plan) -> Outcome:
    executor = plan.executor
    if permit is None:
        return await executor.run(run)
    was_hurried = _is_hurried(run, plan.wall.limits)
    with permit:
        try:
            outcome = await executor.run(run)
        except EngineError as error:
            permit.conclude(error, was_hurried=was_hurried)
            raise
        permit.conclude(outcome.error, was_hurried=was_hurried)
        return outcome


def _is_hurried(run: ToolRun, offered: WallLimits) -> bool:
    """Whether the caller or earlier attempts left a run less time than its tool normally has."""
    tool = run.tool.definition
    request_s = tool.timeout / 1000 if tool.timeout is not None else math.inf
    given_s = smallest(offered.default_wall_s, offered.max_wall_s, tool.timeout_seconds)
    return run.limits.wall_s < min(request_s, given_s)


def _tell(error: EngineError, delay_s: float, max_retries: int, call: CallContext) -> None:
    """Log that an attempt failed, and report it to the call's listeners."""
    number = call.attempts.retry_count + 1
    code = code_of(error)
    call.trace.tell("call.retrying", retry=number, code=code, delay_ms=round(delay_s * 1e3, 3))
    call.handle.retrying(number, max_retries, error)


def _with_time(run: ToolRun, left_s: float) -> ToolRun:
    """Return the run limited to the rest of the call's time. If none is left, it times out."""
    wall_s = max(left_s, 0.001)
    limits = replace(run.limits, wall_s=wall_s, cpu_s=min(run.limits.cpu_s, wall_s))
    return replace(run, limits=limits)


def _summed(before: Outcome, last: Outcome) -> Outcome:
    """Return the last outcome with the CPU and network time of all attempts added up."""
    cpu_ms = last.cpu_ms if before.cpu_ms is None else before.cpu_ms + (last.cpu_ms or 0.0)
    return replace(last, cpu_ms=cpu_ms, network_ms=before.network_ms + last.network_ms)
