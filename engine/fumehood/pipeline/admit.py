"""Admit: give a call a place to run, where its limits are really enforced.

Sixth stage, a lease. Takes an `ApprovedCall`, yields an `AdmittedCall` that holds a place behind
the wall that its plan (`plan.py`) names.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fumehood.circuits.breaker import Circuit, Circuits, Permit
from fumehood.core.errors import CircuitOpen, ShuttingDown
from fumehood.pipeline.approve import ApprovedCall
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import Plan, plan_now
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Lease, Walls


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that holds its place behind a wall."""

    permitted: PermittedCall
    plan: Plan
    lease: Lease
    expected: str | None = None
    """The `base` of the effect that a human approved; the call must find it unchanged."""
    permit: Permit | None = None
    """Permit of the first request to the tool's service, if it calls one."""


async def plan_admission(
    approved: ApprovedCall,
    walls: Walls,
    *,
    is_draining: bool,
    sessions: SessionKeeper | None = None,
    circuits: Circuits | None = None,
) -> admit:
    """Plan where a call runs. The returned `admit` waits for that place when it is entered.

    Raises:
        ShuttingDown: the engine accepts no new calls.
        CircuitOpen: requests to the tool's service are suspended.
        SandboxUnavailable, InvalidParams, ResourceNotFound: as `plan_now`.
    """
    if is_draining:
        raise ShuttingDown(
            "The engine is stopping or not started. Repeat the call when it runs again.",
            retry_after_ms=2000,
        )
    plan = await plan_now(approved.permitted, walls, sessions)
    circuit = circuits.of(plan.upstream) if circuits is not None else None
    if circuit is not None:  # checked before the call waits for a place, and again afterwards
        circuit.require_passable()
    return admit(approved, plan, sessions, circuit)


class admit:  # noqa: N801  # a verb like the other stages; a generator would cost each call more
    """Wait a bounded time for a place, and hold it: `async with admit(…) as admitted`.

    Raises:
        CircuitOpen: requests to the tool's service are suspended.
        SandboxUnavailable: no place became free in time.
        InvalidParams, ResourceNotFound: as `make_plan`.
    """

    __slots__ = ("_approved", "_circuit", "_lease", "_permit", "_plan")

    def __init__(
        self,
        approved: ApprovedCall,
        plan: Plan,
        sessions: SessionKeeper | None = None,
        circuit: Circuit | None = None,
    ) -> None:
        self._approved = approved
        self._circuit = circuit
        self._permit: Permit | None = None
        self._plan = plan
        self._lease = _lease(approved.permitted, plan, sessions)

    async def __aenter__(self) -> AdmittedCall:
        approved = self._approved
        expected = approved.approval.request.expected if approved.approval is not None else None
        lease = await self._lease.__aenter__()
        if self._circuit is not None:
            try:
                self._permit = self._circuit.enter()
            except CircuitOpen as refused:
                await self._lease.__aexit__(CircuitOpen, refused, refused.__traceback__)
                raise
        return AdmittedCall(approved.permitted, self._plan, lease, expected, self._permit)

    async def __aexit__(self, *exc: Any) -> bool | None:
        if self._permit is not None:
            self._permit.give_back()
        return await self._lease.__aexit__(*exc)


def _lease(
    permitted: PermittedCall, plan: Plan, sessions: SessionKeeper | None
) -> AbstractAsyncContextManager[Lease]:
    """Return the lease of the session's container if the call runs in it, otherwise of the wall."""
    options, memory_mb = permitted.request.options, plan.limits.memory_mb
    if plan.placement.is_of_session and plan.session is not None and sessions is not None:
        return sessions.lease(
            permitted.principal,
            options.agent_id,
            plan.session.id,
            language=plan.executor.language,
            memory_mb=memory_mb,
        )
    return plan.wall.lease(
        permitted.trust_domain,
        fresh=plan.placement.needs_fresh_place(options.isolation),
        memory_mb=memory_mb,
        image=plan.image,
    )
