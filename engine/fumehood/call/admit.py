"""Admit: a place to run, with limits that are really enforced there.

Sixth stage, a lease. Takes an `ApprovedCall`, yields an `AdmittedCall` that holds a place
in its wall. Invariant: a limit that the wall cannot enforce on this host refuses the call;
nothing falls back to a weaker wall.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fumehood.call.approve import ApprovedCall
from fumehood.call.authorise import PermittedCall
from fumehood.model.call import CallOptions
from fumehood.model.errors import InvalidParams, SandboxUnavailable, ShuttingDown
from fumehood.model.limits import Limit, Limits, smallest
from fumehood.sandbox.placement import Placement, place
from fumehood.sandbox.wall import Lease, Wall, Walls

RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a call would run, with which limits. Made without taking anything."""

    placement: Placement
    limits: Limits
    wall: Wall
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that has its place. `queue_ms` is how long it waited for it."""

    approved: ApprovedCall
    plan: Plan
    lease: Lease

    @property
    def permitted(self) -> PermittedCall:
        return self.approved.claimed.permitted


def make_plan(permitted: PermittedCall, walls: Walls) -> Plan:
    """Placement, wall and effective limits of a call.

    Raises:
        SandboxUnavailable: the wall is not there, or cannot enforce what it must.
        InvalidParams: a limit that makes no sense on this wall.
    """
    tool, options = permitted.tool.definition, permitted.request.options
    placement = place(tool)
    wall = walls.get(placement.wall)
    missing = wall.required - wall.enforced
    if missing and not wall.enforced:
        raise SandboxUnavailable(
            f"The {placement.wall} wall is not there now: nothing would enforce "
            f"{', '.join(sorted(missing))}, and no weaker wall is used instead. {wall.cure}",
            retryable=wall.heals,
            retry_after_ms=RETRY_AFTER_MS if wall.heals else None,
        )
    if missing:
        raise SandboxUnavailable(
            f"The {placement.wall} wall cannot enforce {', '.join(sorted(missing))} on this host, "
            f"so nothing runs in it. {wall.cure} Run `fumehood doctor` for details.",
            retryable=wall.heals,
            retry_after_ms=RETRY_AFTER_MS if wall.heals else None,
        )
    if Limit.MEMORY not in wall.required and options.memory_limit_mb is not None:
        raise InvalidParams(
            "memory_limit_mb could not be enforced: this tool runs in the engine's own process.",
            fields=["options.memory_limit_mb"],
        )
    _check_isolation(placement, options)
    offered = wall.limits
    wall_s = smallest(
        offered.default_wall_s, offered.max_wall_s, tool.timeout_seconds, options.timeout_seconds
    )
    memory_mb = allowed_mb = None
    if offered.default_memory_mb is not None and offered.max_memory_mb is not None:
        allowed_mb = int(
            smallest(
                offered.default_memory_mb,
                offered.max_memory_mb,
                tool.memory_limit_mb,
                options.memory_limit_mb,
            )
        )
        if allowed_mb < offered.min_memory_mb:
            raise InvalidParams(
                f"memory_limit_mb must be at least {offered.min_memory_mb} here.",
                fields=["options.memory_limit_mb"],
            )
        memory_mb = offered.memory_class(allowed_mb)
    cpu_s = min(wall_s, offered.cpu_s) if offered.cpu_s is not None else wall_s
    limits = Limits(wall_s, cpu_s, memory_mb, offered.output_bytes)
    return Plan(placement, limits, wall, _lowered(options, limits, allowed_mb))


def _check_isolation(placement: Placement, options: CallOptions) -> None:
    if options.isolation is None or options.isolation in placement.isolations:
        return
    if placement.kind == "host":
        why = "this tool runs in the engine's own process"
    else:
        known = " or ".join(f'"{name}"' for name in placement.isolations)
        why = f"for this tool it can be {known}"
    raise InvalidParams(f"isolation could not be enforced: {why}.", fields=["options.isolation"])


def _lowered(options: CallOptions, limits: Limits, allowed_mb: int | None) -> tuple[str, ...]:
    """Say it where a call asked for more than it gets."""
    asked_and_given = (
        ("timeout_seconds", options.timeout_seconds, limits.wall_s, limits.wall_s),
        ("memory_limit_mb", options.memory_limit_mb, limits.memory_mb, allowed_mb),
    )
    return tuple(
        f"{name}: {asked:g} was asked for, {given:g} is "
        + ("the most that is allowed" if asked > allowed else "the next size that there is")
        for name, asked, given, allowed in asked_and_given
        if asked is not None and given is not None and allowed is not None and asked > given
    )


class admit:  # noqa: N801  # a verb like the other stages; a generator would cost each call more
    """Wait for a place, bounded, and hold it: `async with admit(…) as admitted`.

    Raises:
        ShuttingDown: the engine takes no new calls.
        SandboxUnavailable: no place in time, or none that enforces the limits.
    """

    __slots__ = ("_approved", "_lease", "_plan")

    def __init__(self, approved: ApprovedCall, walls: Walls, *, is_draining: bool) -> None:
        if is_draining:
            raise ShuttingDown(
                "The engine is stopping or not started. Repeat the call when it is back.",
                retry_after_ms=2000,
            )
        permitted = approved.claimed.permitted
        self._approved = approved
        self._plan = make_plan(permitted, walls)
        fresh = self._plan.placement.needs_fresh_place(permitted.request.options.isolation)
        self._lease: AbstractAsyncContextManager[Lease] = self._plan.wall.lease(
            permitted.trust_domain, fresh=fresh, memory_mb=self._plan.limits.memory_mb
        )

    async def __aenter__(self) -> AdmittedCall:
        return AdmittedCall(self._approved, self._plan, await self._lease.__aenter__())

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self._lease.__aexit__(*exc)
