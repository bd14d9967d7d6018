"""Action: everything that decides what a call will do, as one document with one hash.

Host side, used by `approve` and by `resume`: a yes is for a document, and is worth nothing where
the document has become another one. What only describes (a trace id, a reason, who waits) is
not in it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.core.call import FunctionAddress
from fumehood.core.json_types import JsonObject
from fumehood.core.usage import money
from fumehood.executors.effects import Effect
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import Plan, image_of
from fumehood.protocol.canonical import canonical, digest_of
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.wall import HasImages

SCHEMA = 1
"""Of the document. Another number is another action."""


@dataclass(frozen=True, slots=True)
class Action:
    """What will happen, and its hash."""

    document: JsonObject
    digest: str


def action_of(permitted: PermittedCall, plan: Plan, effect: Effect | None) -> Action:
    """The document of a call, as things are now."""
    tool, options = permitted.tool.definition, permitted.request.options
    binding = permitted.validated.binding
    document: JsonObject = {
        "schema": SCHEMA,
        "tool": f"{tool.name}@{tool.version}",
        "definition": definition_digest(permitted.tool),
        "arguments": permitted.arguments,
        "agent": options.agent_id,
        "agent_binding": None if binding is None else digest_of(binding.model_dump(mode="json")),
        "principal": permitted.principal.id,
        "session": options.session_id,
        "workspace": None if effect is None else {"base": effect.base, "effect": effect.effect},
        "placement": plan.placement.kind,
        "isolation": options.isolation,
        "place": _place(plan),
        "limits": {
            "timeout_seconds": plan.limits.wall_s,
            "cpu_seconds": plan.limits.cpu_s,
            "memory_mb": plan.limits.memory_mb,
            "output_bytes": plan.limits.output_bytes,
            "enforced": sorted(plan.wall.enforced),
        },
        "network": "none" if plan.placement.kind != "host" else "of the host",
        "secrets": [],
        "cost_ceiling": money(tool.cost_per_use),
    }
    return Action(document, digest_of(document))


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """What is not the same in two documents, by the names of their fields."""
    names = sorted(before.keys() | after.keys())
    # By their canonical text: true is not 1 there.
    return tuple(n for n in names if canonical(before.get(n)) != canonical(after.get(n)))


def definition_digest(tool: RegisteredTool) -> str:
    """The hash of the whole definition, and of the source of what it calls in this process."""
    document: JsonObject = {"definition": tool.definition.model_dump(mode="json")}
    if tool.address is not None:
        document["source"] = _source_of_module(tool.address)
    elif tool.function is not None:
        document["source"] = _source_of_function(tool.function)
    return digest_of(document)


def _place(plan: Plan) -> JsonObject | None:
    """The image and the runtime, where the place is made of one."""
    image = image_of(plan)
    if image is None or not isinstance(plan.wall, HasImages):
        return None
    return {"image": image, **plan.wall.facts_of(image)}


def _source_of_module(address: FunctionAddress) -> str:
    """The hash of the file that another process would import, or of the source that it is sent."""
    if address.source:
        return hashlib.sha256("\0".join(address.source).encode()).hexdigest()
    base = Path(address.import_path).joinpath(*address.module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    return "unknown"


def _source_of_function(function: Any) -> str:
    """The hash of the function's own text, or of its code where there is no text."""
    own = getattr(function, "__self__", function)
    target = inspect.unwrap(getattr(own, "function", function))
    try:
        return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        return "unknown" if code is None else hashlib.sha256(code.co_code).hexdigest()
