"""Rehearse: a dry run. Everything up to `execute`, consuming nothing (mission P12).

Takes a `PermittedCall`, returns an `Outcome` that says what would happen and why. Faults in
the request itself are refused as in a real call before this is reached.
"""

from __future__ import annotations

from typing import Any

from fumehood.call.admit import make_plan
from fumehood.call.authorise import PermittedCall
from fumehood.call.shorten import shortened
from fumehood.executors.outcome import Outcome
from fumehood.gates.approval import approval_need
from fumehood.model.errors import EngineError, RequiresHumanApproval
from fumehood.model.json_types import JsonObject
from fumehood.model.usage import money
from fumehood.sandbox.wall import Walls


def rehearse(permitted: PermittedCall, walls: Walls) -> Outcome:
    """What the call would do, without doing it."""
    tool = permitted.tool.definition
    need = approval_need(tool)
    refusal: str | None = RequiresHumanApproval.code if need.required else None
    plan: JsonObject = {"placement": None, "limits": None}
    try:
        made = make_plan(permitted, walls)
        plan = {
            "placement": {"kind": made.placement.kind, "why": made.placement.why},
            "limits": {
                "timeout_seconds": made.limits.wall_s,
                "memory_mb": made.limits.memory_mb,
                "output_bytes": made.limits.output_bytes,
                "enforced": sorted(made.wall.enforced),
            },
        }
    except EngineError as error:
        refusal = refusal or error.code
        plan["placement"] = {"kind": None, "why": error.message}
    answer: dict[str, Any] = {
        "dry_run": True,
        "would_run": refusal is None,
        "refused_with": refusal,
        **plan,
        "approval": {"required": need.required},
        "policy": {"rule": need.rule},
        "cost": {"per_use": money(tool.cost_per_use)},
        "arguments": shortened(permitted.validated.shown_arguments),
    }
    return Outcome.rehearsed(answer)
