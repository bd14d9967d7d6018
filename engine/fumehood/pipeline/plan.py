"""Plan: where a call would run, and with which limits. A plan reserves nothing.

Planning is not a stage: plans are made for dry runs, for approval requests and before `admit`.
Invariant: if the wall cannot enforce a required limit on this host, the call is refused. It never
falls back to a weaker wall. If a wall is down, `plan_now` checks whether it has recovered before
the call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fumehood.call_options import chosen_options
from fumehood.core.call import CallOptions
from fumehood.core.errors import EngineError, InvalidParams, SandboxUnavailable
from fumehood.core.hosts import network_wish
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Limit, Limits, WallLimits, smallest, strongest
from fumehood.core.session import SessionRecord
from fumehood.core.tool import DECISION, ToolDefinition
from fumehood.executors.around import needs_of, not_given
from fumehood.executors.base import Executor, HeldAction, Placement
from fumehood.executors.kinds import EXECUTORS, is_weaker
from fumehood.parts import parts
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.sandbox.host import Host
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import (
    HasImages,
    ImageMissing,
    Wall,
    WallDown,
    Walls,
    require_enforcing,
    require_grade,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a call would run, and with which limits."""

    placement: Placement
    limits: Limits
    wall: Wall
    executor: Executor
    warnings: tuple[str, ...] = ()
    session: SessionRecord | None = None
    """The call's session, or None. A tool with a session does not always run in the session's
    container."""
    image: str | None = None
    """The image of the container in which the call runs, or None if the wall has no images."""
    network: tuple[str, ...] = ()
    """The requested hosts that the operator allows the program to reach."""
    upstream: str | None = None
    """Name of the service that the tool calls (see `Executor.upstream`), or None."""


async def plan_now(
    permitted: PermittedCall, walls: Walls, sessions: SessionKeeper | None = None
) -> Plan:
    """Call `make_plan`. If the wall is down or an image is missing, check the wall again and retry
    once.

    Raises the same errors as `make_plan`.
    """
    try:
        return await _with_additions(make_plan(permitted, walls, sessions), permitted)
    except (WallDown, ImageMissing):
        tool, options = permitted.tool.definition, permitted.request.options
        in_session = options.session_id is not None
        wall = walls.get(_executor(permitted).placement(tool, in_session=in_session).wall)
        if not isinstance(wall, HasImages):
            raise
        await wall.look_again()
    return await _with_additions(make_plan(permitted, walls, sessions), permitted)


async def _with_additions(plan: Plan, permitted: PermittedCall) -> Plan:
    """Return the plan with an image that includes what the call's options add, such as packages.

    Without such options, the plan is returned unchanged. Raises InvalidParams if the call does not
    run in a container of its own.
    """
    options = permitted.request.options
    adding = [option for option in chosen_options(options) if option.adds_to_image]
    if not adding:
        return plan
    if plan.image is None or plan.placement.is_of_session or not isinstance(plan.wall, HasImages):
        raise InvalidParams(
            "Images can be extended only for calls that run in a container of their own.",
            fields=[f"options.{option.name}" for option in adding],
        )
    wanted = [wish for option in adding for wish in option.of(options)]
    image = await plan.wall.with_additions(plan.image, wanted, permitted.principal.id)
    return replace(plan, image=image)


def _check_options(permitted: PermittedCall, executor: Executor) -> None:
    """Raise InvalidParams if the call requests network access that its tool cannot have, or an
    invalid host.
    """
    wishes = permitted.request.options.network or ()
    if wishes and executor.language is None:
        raise InvalidParams(
            "Only programs in containers can have network access.", fields=["options.network"]
        )
    for host in wishes:
        try:
            network_wish(host)
        except ValueError as error:
            raise InvalidParams(
                f"The host {host[:100]!a} of network {error}.", fields=["options.network"]
            ) from None


def _check_plan(permitted: PermittedCall, plan: Plan) -> None:
    """Raise EngineError if no part provides a feature that the call needs, or if an option
    contradicts the plan.
    """
    needs = needs_of(permitted.tool.definition, permitted.arguments, plan.network)
    if needs and (missing := needs.difference(*(part.gives for part in parts()))):
        raise not_given(missing)
    for option in chosen_options(permitted.request.options):
        if option.check is not None:
            option.check(permitted, plan)


def with_options(
    permitted: PermittedCall, plan: Plan, options: Mapping[str, Any]
) -> PermittedCall | None:
    """Return the call with the given options replaced. Return None if the call already has these
    options, or if they are invalid for the call or its plan.
    """
    request = permitted.request
    changed = request.options.model_copy(update=dict(options))
    if changed == request.options:
        return None
    found = permitted.with_request(replace(request, options=changed))
    try:
        _check_options(found, plan.executor)
        _check_plan(found, plan)
    except EngineError:
        return None
    return found


def _executor(permitted: PermittedCall) -> Executor:
    """Return the executor that runs the call. If the call requests approval of an action, this is
    the action itself (`request.held`). Otherwise, it is the executor of the call's tool.

    Raises the same errors as `executor_of`.
    """
    held = permitted.request.held
    if held is None:
        return executor_of(permitted.tool.definition)
    assert isinstance(held, HeldAction)
    return held


def executor_of(tool: ToolDefinition) -> Executor:
    """Return the executor of a tool.

    Raises:
        SandboxUnavailable: this version of the engine has no such executor.
    """
    executor = EXECUTORS.get(tool.executor)
    if executor is None:
        raise SandboxUnavailable(
            f"This version has no sandbox for the executor {tool.executor!r}, and never falls back "
            "to a weaker one.",
            retryable=False,
        )
    return executor


def upstream_of(tool: ToolDefinition) -> str | None:
    """Return the name of the service that a tool calls, or None if it calls no service."""
    executor = EXECUTORS.get(tool.executor)
    return executor.upstream(tool) if executor is not None else None


def make_plan(
    permitted: PermittedCall, walls: Walls, sessions: SessionKeeper | None = None
) -> Plan:
    """Plan the placement, wall and effective limits of a call.

    Without `sessions`, a call that needs a session is refused.

    Raises:
        WallDown: the wall currently enforces no limits.
        ImageMissing: the image that the call needs is missing.
        SandboxUnavailable: the wall cannot enforce a required limit, or has no image for the
            language.
        InvalidParams: an option is impossible for this wall or session.
        ResourceNotFound: this caller and agent have no such session, or it has ended.
        EngineError: a part refuses one of the call's options.
    """
    tool, options = permitted.tool.definition, permitted.request.options
    executor = _executor(permitted)
    placement = executor.placement(tool, in_session=options.session_id is not None)
    wall = walls.get(placement.wall)
    upstream = executor.upstream(tool) if isinstance(wall, Host) else None
    if upstream is not None and isinstance(wall, Host):
        wall = wall.for_upstream(upstream)
    required = require_enforcing(placement.wall, wall.status)
    if Limit.MEMORY not in required and options.memory_limit_mb is not None:
        raise InvalidParams(
            "memory_limit_mb could not be enforced: this tool runs in the engine's own process.",
            fields=["options.memory_limit_mb"],
        )
    _check_isolation(placement, options)
    offered, language = wall.limits, executor.language
    session = _session(permitted, placement, language, offered, sessions)
    _check_options(permitted, executor)
    place = session if placement.is_of_session else None
    wall_s = smallest(
        offered.default_wall_s, offered.max_wall_s, tool.timeout_seconds, options.timeout_seconds
    )
    memory_mb = allowed_mb = None
    if place is not None:
        memory_mb = allowed_mb = place.memory_mb
    elif offered.default_memory_mb is not None and offered.max_memory_mb is not None:
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
    disk_mb = place.disk_mb if place is not None else None
    least = None
    if placement.wall == "container":
        least = _least_grade(permitted, place, wall)
    limits = Limits(wall_s, cpu_s, memory_mb, offered.output_bytes, disk_mb, least)
    warnings = _lowered(options, limits, allowed_mb)
    image = place.image if place is not None else None
    if place is None and language is not None and isinstance(wall, HasImages):
        image = wall.image_for(language)
    network = permitted.validated.resolved.network
    if place is not None and language is not None:
        network += place.network
    plan = Plan(placement, limits, wall, executor, warnings, session, image, network, upstream)
    _check_plan(permitted, plan)
    return plan


def is_in_weaker_container(
    validated: ValidatedCall, least: Grade, walls: Walls, sessions: SessionKeeper
) -> bool:
    """Return whether the call would run in a container of a weaker grade than `least`, as far as is
    known. Return False if it runs in no container.
    """
    request = validated.resolved.request
    if request.held is not None:  # an action outside of containers
        return False
    session_id = request.options.session_id
    grade = sessions.grade_of(session_id) if session_id is not None else None
    grade = grade or walls.get("container").status.grade
    tool = validated.resolved.tool.definition
    return is_weaker(tool, grade, least, in_session=session_id is not None) is True


def can_run_now(tool: ToolDefinition, walls: Walls) -> bool:
    """Whether a call of the tool without a session could run now, because the tool's wall and image
    are known to be available.
    """
    try:
        executor = executor_of(tool)
        placement = executor.placement(tool, in_session=False)
        wall = walls.get(placement.wall)
        require_enforcing(placement.wall, wall.status)
        if executor.language is not None and isinstance(wall, HasImages):
            wall.image_for(executor.language)
    except SandboxUnavailable:
        return False
    return True


async def place_of(plan: Plan, sessions: SessionKeeper) -> JsonObject | None:
    """Return a description that identifies the image and runtime in which a call would run. Return
    None if the call runs without an image.

    An approval is valid only for the image and runtime that this description identifies.

    Raises:
        ResourceNotFound: the call's session has ended.
        SandboxUnavailable: the image is missing, or its identity cannot be determined now.
    """
    if plan.image is None or not isinstance(plan.wall, HasImages):
        return None
    if plan.session is not None and plan.placement.is_of_session:
        return await sessions.facts_of(plan.session.id)
    return await plan.wall.facts_of(plan.image)


def _session(
    permitted: PermittedCall,
    placement: Placement,
    language: str | None,
    offered: WallLimits,
    sessions: SessionKeeper | None,
) -> SessionRecord | None:
    """Return the session that the call names, or None if it names no session.

    Raises EngineError if the session does not fit the call. For example, a call cannot change the
    memory size of its session.
    """
    tool, options = permitted.tool.definition, permitted.request.options
    if tool.executor == DECISION:
        return None  # a decision is about a session of the caller's own system
    if options.session_id is None:
        if placement.is_of_session:
            raise InvalidParams(
                f"{tool.name} works on the files of a session: it needs a session_id.",
                fields=["options.session_id"],
            )
        return None
    if sessions is None:
        raise SandboxUnavailable("This engine has no sessions.", retryable=False)
    principal, agent_id = permitted.principal, options.agent_id
    if not placement.is_of_session:
        return sessions.examine(principal, agent_id, options.session_id)
    asked_mb = options.memory_limit_mb
    session = sessions.examine(
        principal,
        agent_id,
        options.session_id,
        language=language,
        memory_mb=offered.memory_class(asked_mb) if asked_mb is not None else None,
    )
    if tool.memory_limit_mb is not None and tool.memory_limit_mb < session.memory_mb:
        raise InvalidParams(
            f"{tool.name} may have {tool.memory_limit_mb} MB of memory at most, and this session "
            f"has {session.memory_mb} MB. Use a smaller session.",
            fields=["options.session_id"],
        )
    return session


def _least_grade(permitted: PermittedCall, place: SessionRecord | None, wall: Wall) -> Grade | None:
    """Return the weakest grade of a container in which the call may run, or None for the engine's.
    `place` is the session in whose container it runs, or None.

    Raises SandboxUnavailable if it is known that the wall's containers are weaker.
    """
    least = strongest(permitted.least_grade, permitted.tool.definition.least_grade)
    if place is not None:  # its own container decides, when the session is leased
        return strongest(least, place.least_grade)
    if wall.status.grade is not None:
        require_grade(wall.status.grade, least)
    return least


def _check_isolation(placement: Placement, options: CallOptions) -> None:
    if options.isolation is None or options.isolation in placement.isolations:
        return
    if options.isolation == "session" and placement.wall == "container":
        raise InvalidParams(
            'isolation "session" needs a session_id.',
            fields=["options.isolation", "options.session_id"],
        )
    if placement.kind == "host":
        why = "this tool runs in the engine's own process"
    else:
        known = " or ".join(f'"{name}"' for name in placement.isolations)
        where = "in a session" if placement.is_of_session else "for this tool"
        why = f"{where} it can be {known}"
    raise InvalidParams(f"isolation could not be enforced: {why}.", fields=["options.isolation"])


def _lowered(options: CallOptions, limits: Limits, allowed_mb: int | None) -> tuple[str, ...]:
    """Return a warning for each limit in `limits` that is lower than `options` requested.
    `allowed_mb` is the maximum memory that the call could have, in MB.
    """
    if options.timeout_seconds is None and options.memory_limit_mb is None:
        return ()
    asked_and_given = (
        ("timeout_seconds", options.timeout_seconds, limits.wall_s, limits.wall_s),
        ("memory_limit_mb", options.memory_limit_mb, limits.memory_mb, allowed_mb),
    )
    return tuple(
        f"{name}: {asked:g} was asked for, {given:g} is "
        + ("the most that is allowed" if asked > allowed else "the next smaller size")
        for name, asked, given, allowed in asked_and_given
        if asked is not None and given is not None and allowed is not None and asked > given
    )
