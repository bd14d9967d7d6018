"""Permit: the first three stages of a call. They permit or refuse it.

A program can only call tools that are marked as callable by programs. Therefore, calls of programs
never nest, and they never wait for the sandbox that the program itself occupies. Rules in shadow
mode are only logged.
"""

from __future__ import annotations

from functools import partial

import anyio.to_thread

from fumehood.core.errors import PermissionDenied
from fumehood.core.long_text import is_long
from fumehood.core.tool import ToolDefinition
from fumehood.pipeline.authorize import PermittedCall, authorize
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.plan import is_in_weaker_container
from fumehood.pipeline.resolve import ResolvedCall, resolve
from fumehood.pipeline.validate import ValidatedCall, validate


def permit(call: CallContext, services: PipelineServices) -> PermittedCall:
    """Resolve, validate and authorize a call.

    Raises:
        EngineError: one of these stages refuses the call.
    """
    return _authorized(call, validate(_resolved(call, services)), services)


async def permit_apart(call: CallContext, services: PipelineServices) -> PermittedCall:
    """Resolve, validate and authorize a call, as `permit` does, but validate long arguments in a
    thread. Raises the same errors.
    """
    resolved = _resolved(call, services)
    if not is_long(call.request.arguments):
        return _authorized(call, validate(resolved), services)
    return _authorized(call, await anyio.to_thread.run_sync(validate, resolved), services)


def _resolved(call: CallContext, services: PipelineServices) -> ResolvedCall:
    call.resolved = resolved = call.trace.passed(
        "resolve",
        resolve(call.request, services.registry, services.identities.agents, services.clock.now),
    )
    if call.request.parent_id is not None and call.request.held is None:
        require_for_program(resolved.tool.definition)
    return resolved


def require_for_program(tool: ToolDefinition) -> None:
    """Raise PermissionDenied if a program may not call the tool."""
    if tool.executor.startswith(("code:", "workspace:")):
        raise PermissionDenied(
            f"{tool.name} cannot be called from a program: it runs programs, or works on a "
            "session's files, which the program itself can do. Do not retry."
        )


def _authorized(
    call: CallContext, validated: ValidatedCall, services: PipelineServices
) -> PermittedCall:
    trace = call.trace
    call.validated = trace.passed("validate", validated)

    def exceeds(key: str) -> bool:
        found = services.parts.excesses(validated, but={gate for gate, _ in call.holds})
        return any(gate.key == key for gate, _ in found)

    permitted = trace.passed(
        "authorize",
        authorize(
            validated,
            services.policy,
            exceeds,
            partial(is_in_weaker_container, walls=services.walls, sessions=services.sessions),
            services.sessions.own_env,
        ),
    )
    for part in services.parts.requiring:
        part.require_possible(permitted, services)
    return permitted


def log_shadow(permitted: PermittedCall, services: PipelineServices) -> None:
    """Count the policy rule that decided on the call, and log the rules in shadow mode that would
    have decided on it. Rules in shadow mode are on trial, and have no effect.
    """
    services.policy.count(permitted.decision)
    if not permitted.decision.shadow:
        return
    services.log.info(
        "policy.shadow",
        tool=permitted.tool.definition.name,
        call_id=permitted.request.call_id,
        trace_id=permitted.request.trace_id,
        rules=list(permitted.decision.shadow),
    )
