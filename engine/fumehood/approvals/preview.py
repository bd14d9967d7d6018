"""The action of a call, which approvers see and which is checked again when the call starts.

Host side, used by `stored_calls` and `scheduler`. The *action* is one document with everything that
affects how the call runs, and the hash of this document. An approval is bound to the action: if the
document differs when the call starts, the approval is invalid. Descriptive fields, such as a trace
id or a reason, are not in the document. Approvers also see the call's effect on the workspace, and
the budget that the call would exceed. If the arguments are edited, the call has another action.
Invariant: an edit never lowers the quorum, and never admits approvers whom the original call did
not admit.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fumehood.approvals.model import Approval, StoredApproval
from fumehood.core.call import FunctionAddress
from fumehood.core.errors import PermissionDenied
from fumehood.core.json_types import JsonObject
from fumehood.core.usage import money
from fumehood.executors.effects import Effect
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import context_of
from fumehood.pipeline.context import PipelineServices
from fumehood.pipeline.plan import Plan
from fumehood.policy.model import Decision
from fumehood.protocol.canonical import canonical, digest_of
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.sessions import SessionKeeper

SCHEMA = 1
"""Version of the format of the action's document. Actions of different versions never match."""


@dataclass(frozen=True, slots=True)
class Action:
    """A document with everything that affects how a call runs, and the hash of the document."""

    document: JsonObject
    digest: str


def action_of(
    permitted: PermittedCall,
    plan: Plan,
    place: JsonObject | None,
    effect: Effect | None,
    sends: JsonObject | None,
) -> Action:
    """Return the action of a call: everything that determines what the call would do if it ran now.

    `place` describes where the call would run (`plan.place_of`), `effect` the changes that it would
    make (`preview`), and `sends` what it would send to another service (`sends_of`).
    """
    tool, options = permitted.tool.definition, permitted.request.options
    binding = permitted.validated.binding
    document: JsonObject = {
        "schema": SCHEMA,
        "tool": f"{tool.name}@{tool.version}",
        "definition": definition_digest(permitted.tool, permitted.request.context, sends),
        "arguments": permitted.arguments,
        "agent": options.agent_id,
        "agent_binding": None if binding is None else digest_of(binding.model_dump(mode="json")),
        "principal": permitted.principal.id,
        "session": options.session_id,
        **({"session_env": sorted(permitted.session_env)} if permitted.session_env else {}),
        "workspace": None if effect is None else {"base": effect.base, "effect": effect.effect},
        "placement": plan.placement.kind,
        "isolation": options.isolation,
        "place": place,
        "limits": _limits(plan),
        "network": _network(plan, sends),
        "secrets": sorted((sends or {}).get("secrets", ())),
        **({} if sends is None else {"sends": digest_of(sends)}),
        "cost_ceiling": money(tool.cost_per_use),
        **context_of(permitted.request),
    }
    return Action(document, digest_of(document))


def sends_of(permitted: PermittedCall, plan: Plan, services: PipelineServices) -> JsonObject | None:
    """Return the request that a call would send to another service, or None if the call sends no
    request. Nothing is sent.

    Raises:
        EngineError: the call itself would fail with this error.
    """
    return plan.executor.sends(
        permitted.tool, permitted.arguments, services.cursors, permitted.principal.id
    )


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that differ between two documents."""
    names = sorted(before.keys() | after.keys())
    return tuple(name for name in names if not is_same(before, after, name))


def is_same(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
    """Return whether the field `name` has the same value in two documents. If it is missing in one
    of them, return False.

    The values are compared as canonical JSON. Therefore, true differs from 1, but 1.0 equals 1.
    """
    if name not in before or name not in after:
        return False
    return canonical(before[name]) == canonical(after[name])


def definition_digest(
    tool: RegisteredTool, context: JsonObject | None = None, sends: JsonObject | None = None
) -> str:
    """Return a hash of a tool's definition, its code, and the context of the call.

    `context` is the context that the caller gave for the call. `sends` is what the call would send
    to another service (`sends_of`). If a server runs the tool, the hash covers `sends`, which
    describes the server, instead of code. Otherwise, `sends` is ignored.
    """
    document: JsonObject = {"definition": tool.definition.model_dump(mode="json")}
    if context is not None:
        document["context"] = context
    if tool.service is not None and sends is not None:
        document["server"] = sends | tool.service.bound()
    if tool.address is not None:
        document["source"] = _source_of_module(tool.address)
    elif tool.function is not None:
        document["source"] = _source_of_function(tool.function)
    return digest_of(document)


async def preview(permitted: PermittedCall, plan: Plan, sessions: SessionKeeper) -> Effect | None:
    """Return the effect that a call would have on the workspace of its session, or None if the tool
    has no preview. Nothing is changed.

    Waits until the session is free. The effect contains a hash of the workspace (`Effect.base`).
    When the approved call starts, the executor refuses to run it if the workspace no longer has
    this hash.

    Raises:
        EngineError: the call itself would fail now, because its session has ended, is lost or is
            too busy, or has too many files.
    """
    tool = permitted.tool.definition
    if plan.executor.effect is not None:
        return plan.executor.effect
    if not plan.executor.has_preview or plan.session is None:
        return None
    # This is not a call in the session; it reads the files as the session's owner may.
    turn = await sessions.files(permitted.principal, plan.session.id)
    async with turn as lease:
        return await plan.executor.preview(tool, permitted.arguments, plan.limits, lease)


def full_reason(decision: Decision, excess: str | None, unusable: Sequence[str]) -> str | None:
    """Return the reason that approvers see for a request, or None if there is nothing to say.

    The result combines the reason in `decision`, `excess` and `unusable`. `excess` is a text about
    the limit that the call would exceed, or None. `unusable` are the names of secrets without a
    usable value.
    """
    parts = [
        decision.reason,
        excess,
        f"Secrets without a usable value now: {', '.join(unusable)}." if unusable else None,
    ]
    return " ".join(filter(None, parts)) or None


def _limits(plan: Plan) -> JsonObject | None:
    if plan.placement.is_outside:
        return None
    return {
        "timeout_seconds": plan.limits.wall_s,
        "cpu_seconds": plan.limits.cpu_s,
        "memory_mb": plan.limits.memory_mb,
        "output_bytes": plan.limits.output_bytes,
        "enforced": sorted(plan.wall.status.enforced),
    }


def _network(plan: Plan, sends: JsonObject | None) -> str | None:
    if plan.placement.is_outside:
        return None
    hosts = plan.network or (sends or {}).get("network")
    if hosts:
        return f"by the gateway: {', '.join(hosts)}"
    return "none" if plan.placement.kind != "host" else "of the host"


def _source_of_module(address: FunctionAddress) -> str:
    """Return a hash of the module file from which another process imports a function. `address` is
    the function's address. For a pickled function, return the digest in the address.
    """
    if address.pickled:
        return address.digest
    base = Path(address.import_path).joinpath(*address.module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    return "unknown"


def _source_of_function(function: Any) -> str:
    """Return a hash of a function's source, or of its bytecode if the source is not available."""
    own = getattr(function, "__self__", function)
    target = inspect.unwrap(getattr(own, "function", function))
    try:
        return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        return "unknown" if code is None else hashlib.sha256(code.co_code).hexdigest()


# -- edits ---------------------------------------------------------------------------------

_OF_ACTION = ("arguments", "sends", "preview", "previewed_at", "binding", "action_digest")
_OF_RULES = ("rule", "asked_by", "reason", "budget", "policy_version")


def with_action(stored: StoredApproval, new: StoredApproval) -> StoredApproval:
    """Return a copy of `stored` that has the action of `new`: the new arguments, and everything
    else that determines what the call would do. Both must be approvals of the same call.
    """
    asked = new.request
    request = replace(stored.request, arguments=asked.arguments, expected=asked.expected)
    return replace(stored, approval=_taking(stored, new, _OF_ACTION), request=request)


def edited(stored: StoredApproval, new: StoredApproval, *, is_asked: bool) -> StoredApproval:
    """Return `stored` with the arguments and the action of `new`.

    `new` is the approval that the edited call would request. `is_asked` says whether the policy
    requires approval for the edited call too.

    Raises:
        PermissionDenied: too few approvers may decide on both the original and the edited call.
    """
    before, after = stored.approval, new.approval
    both = [names for names in (before.approvers, after.approvers) if names]
    admitted = tuple(name for name in both[0] if all(name in them for them in both)) if both else ()
    quorum = max(before.quorum, after.quorum)
    if both and len(admitted) < quorum:
        raise PermissionDenied(
            "The edited call needs other approvers than this one. Deny this one, and let the "
            "caller ask for the edited call."
        )
    changed = with_action(stored, new)
    approval = _taking(changed, new, _OF_RULES) if is_asked else changed.approval
    asked = before.arguments if before.asked_arguments is None else before.asked_arguments
    is_restored = canonical(asked) == canonical(after.arguments)
    fields: JsonObject = {"approvers": admitted, "quorum": quorum}
    fields["asked_arguments"] = None if is_restored else asked
    hidden = tuple(sorted({*stored.request.hidden, *new.request.hidden}))
    request = replace(changed.request, hidden=hidden)
    return replace(changed, approval=approval.model_copy(update=fields), request=request)


def _taking(stored: StoredApproval, new: StoredApproval, names: Sequence[str]) -> Approval:
    return stored.approval.model_copy(update={name: getattr(new.approval, name) for name in names})


def edit_warning(stored: StoredApproval) -> str | None:
    """Return the warning for the caller that an approver edited the call, or None if nobody did.

    The warning names the changed arguments, but not their values. It omits arguments that the
    agent's configuration fixes.
    """
    approval = stored.approval
    asked, done = approval.asked_arguments, approval.arguments
    if asked is None:
        return None
    names = [name for name in changed_fields(asked, done) if name not in stored.request.hidden]
    which = f": changed {', '.join(map(_pointer, names))}" if names else ""
    return f"approval: a human changed the arguments before this call ran{which}"


def _pointer(name: str) -> str:
    """Return the JSON pointer (RFC 6901) to the argument with this name."""
    return "/" + name.replace("~", "~0").replace("/", "~1")
