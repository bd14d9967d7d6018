"""Text about an approval for the people who decide on it, in the command line and the console.

The content of a call comes from a model or its prompt, so it is untrusted. Invariants: untrusted
text in a sentence is escaped (`core/escaping.py`); a part of a preview that this module cannot
describe is still shown (`is_shown`, `rest_of`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from fumehood.approvals.model import Approval, ApprovalState
from fumehood.core.errors import OutcomeUnknown
from fumehood.core.escaping import json_line, misleading_in, visible
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, NET_TOOL, listed
from fumehood.core.part import ToolKind
from fumehood.parts import tool_kinds

OUTSIDE = "Outside fumehood: no limits, no sandbox, network unknown"
"""The warning about a call that its caller runs itself."""

_PARTS = {
    "agent_binding": "what its agent may do",
    "cost_ceiling": "what it may cost",
    "definition": "the tool",
    "limits": "its limits",
    "place": "the place where it runs",
    "placement": "the place where it runs",
    "tool": "the version of the tool",
    "session_env": "the environment variables of its session",
    "secrets": "the secrets that it sends",
    "sends": "what it sends",
    "workspace": "the files of its session",
}
"""Maps each part of an action that `Approval.changed` can name to the words that people read."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)

_HEADINGS = {
    ApprovalState.STARTED: "What changes now",
    ApprovalState.DONE: "What changed",
    ApprovalState.FAILED: "What was to change",
    ApprovalState.INTERRUPTED: "What may have changed",
    ApprovalState.DENIED: "What would have changed",
    ApprovalState.EXPIRED: "What would have changed",
    ApprovalState.CANCELLED: "What would have changed",
}

SIGNS = {"added": "+", "changed": "~", "removed": "-"}
_VERBS = {"added": "adds", "changed": "changes", "removed": "removes"}
_PLURALS = {"directory": "directories", "entry": "entries"}
KNOWN_OF_ALL = frozenset(
    {*SIGNS, "missing", "kept", "executed", "counts", "truncated", "would_fail"}
)
_KNOWN_COUNTS = frozenset({*SIGNS, "removed_bytes"})
_KNOWN_OF_ONE = frozenset(
    {
        "path", "path_base64", "kind", "special", "mode", "size", "sha256", "links", "unread",
        "target", "target_base64", "before", "after", "other_names", "diff", "diff_truncated",
        "diff_coarse", "binary", "too_large", "conflict",
    }
)  # fmt: skip
_KNOWN_OF_STATE = frozenset({"kind", "mode", "size", "sha256", "target"})
_MARKS = {
    "unread": "cannot be read",
    "binary": "not text",
    "too_large": "too large to compare",
}


def ago(moment: datetime, now: datetime) -> str:
    """Format a time relative to now: `in 5 m`, `2 h ago`, `now`."""
    seconds = int((moment - now).total_seconds())
    size = abs(seconds)
    if not size:
        return "now"
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if size >= 2 * length:
            shown = f"{size // length} {unit}"
            break
    else:
        shown = f"{size} s"
    return f"in {shown}" if seconds > 0 else f"{shown} ago"


def is_outside(approval: Approval) -> bool:
    """Return True if the caller runs the tool itself, and the engine only decides on the call."""
    return approval.tool.startswith(EXTERNAL)


def place_in_words(approval: Approval) -> str:
    """Describe the place where the call runs.

    The description is empty if the place is unknown, or if the caller runs the tool itself.
    """
    binding, sends = approval.binding or {}, approval.sends or {}
    place = binding.get("place") or sends
    parts = (binding.get("placement"), place.get("image"), place.get("runtime"))
    if is_outside(approval):
        return ""
    if parts[0] != "host":
        return " · ".join(str(part) for part in parts if part)
    if "url" in sends or approval.tool == NET_TOOL:
        return "At the service: the engine sends the request, and runs nothing"
    if "command" in sends:
        return "On this machine without a sandbox, as a program of the engine's user"
    return "On this machine without a sandbox, with the rights of the engine's user"


def network_in_words(approval: Approval) -> str:
    """Describe the network that the call can reach.

    The description is empty if the network is unknown, or if the call only sends one request.
    """
    network = (approval.binding or {}).get("network")
    if network != "of the host":
        return network or ""
    is_request = "url" in (approval.sends or {}) or approval.tool == NET_TOOL
    return "" if is_request else "all that this machine reaches"


def sends_in_words(approval: Approval) -> str:
    """Describe the recipient of what the call sends, or return an empty text if none is known."""
    sends = approval.sends or {}
    if (kind := _recipient(sends)) is not None:
        return f"{kind.place} {sends[kind.recipient or '']}"
    return f"{sends['method']} {sends['host']}" if "method" in sends else ""


def sends_heading(approval: Approval) -> str:
    """Return the heading of the section that shows what the call sends."""
    kind = _recipient(approval.sends or {})
    return kind.place if kind is not None else "Request"


def _recipient(sends: JsonObject) -> ToolKind | None:
    """Return the kind of tool to which a call belongs, according to what the call sends. Return
    None if no kind is found.

    `sends` describes what the call sends. A kind of tool that a part adds can have a key,
    `ToolKind.recipient`. The first kind whose key is in `sends` is returned.
    """
    if not sends:
        return None
    return next((kind for kind in tool_kinds().values() if kind.recipient in sends), None)


def ending_in_words(approval: Approval) -> str:
    """Describe why a call did not end as its approver decided: for example, because it expired, was
    cancelled, or failed after the approval. Return an empty text for any other call.
    """
    has_started = approval.started_at is not None
    done = "It may have done a part of its work." if has_started else "Nothing was done."
    match approval.state:
        case ApprovalState.EXPIRED:
            return f"{_expiry_in_words(approval)} Nothing was done."
        case ApprovalState.CANCELLED:
            return f"The call was cancelled. {done}"
        case ApprovalState.INTERRUPTED:
            return "The engine ended while this call ran. It may have taken effect."
        case ApprovalState.DONE | ApprovalState.FAILED if approval.code == OutcomeUnknown.code:
            return "The engine ended while this call ran. Somebody recorded later how it ended."
        case ApprovalState.FAILED if has_started:
            return f"The call was approved and started, but ended with {approval.code}."
        case ApprovalState.FAILED:
            return f"The call was approved, but could not start: {approval.code}. Nothing was done."
    return ""


def _expiry_in_words(approval: Approval) -> str:
    if words := approval.outlived_in_words:
        return f"{words}."
    if approval.changed:
        names = dict.fromkeys(_PARTS.get(one, one.replace("_", " ")) for one in approval.changed)
        return f"Changed since it was asked for: {', '.join(names)}."
    was = "started" if approval.decided_at is not None else "decided"
    return f"It was not {was} in time."


def hidden_in(approval: Approval) -> str:
    """List the misleading characters in an approval's texts, each with its number of occurrences.

    These characters are shown escaped.
    """
    found: Counter[str] = Counter()
    shown = [approval.arguments, approval.asked_arguments, approval.sends, approval.preview]
    for text in _texts([*shown, approval.reason, approval.tool]):
        found.update(misleading_in(text))
    named = [
        f"U+{ord(char):04X} {unicodedata.name(char, 'control character')} ×{count}"
        for char, count in found.most_common()
    ]
    return listed(named)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, including the keys of objects.

    The search is iterative, because an untrusted value may be nested too deeply for recursion.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item


def argument_name(name: str) -> str:
    """Return an argument's name, quoted if it could be misread: `a=1` looks like a name and a
    value.
    """
    return name if _PLAIN_NAME.fullmatch(name) else json_line(name)


def context_in(preview: JsonObject | None) -> JsonObject | None:
    """Return the context that the caller of an `external:` tool sent with its request for a
    decision.

    `preview` is the `preview` of the call's approval. The context is its only entry. Return None if
    `preview` has another form.
    """
    context = preview.get("context") if preview is not None and len(preview) == 1 else None
    return context if isinstance(context, dict) else None


def effect_heading(approval: Approval) -> str:
    """Return the heading above the description of a call's effect. It depends on the approval's
    state, for example `What will change` or `What changed`.
    """
    return _HEADINGS.get(approval.state, "What will change")


def preview_in_words(preview: JsonObject) -> str:
    """Summarise what is added, changed and removed according to a preview, such as `removes 1 file,
    7 bytes`.

    Return an empty text if the effect is unknown.
    """
    if KNOWN_OF_ALL.isdisjoint(preview):
        return ""
    parts = [words for what in SIGNS if (words := _how_much(preview, what))]
    if executed := entries_of(preview, "executed"):
        parts.append(f"{len(executed):,} executable by your tools")
    return "; ".join(parts) or "changes nothing"


def _how_much(preview: JsonObject, what: str) -> str:
    listed = entries_of(preview, what)
    counts = preview.get("counts")
    counts = counts if isinstance(counts, dict) else {}
    in_all = max(number_of(counts.get(what)), len(listed))
    if in_all == 0:
        return ""
    if in_all > len(listed):
        said = _amount(in_all, "entry")
    else:
        kinds = Counter(_kind(entry, what) for entry in listed)
        said = ", ".join(_amount(number, kind) for kind, number in kinds.items())
    size = sum(number_of(entry.get("size")) for entry in listed)
    if what == "removed":
        size = max(number_of(counts.get("removed_bytes")), size)
    if what != "changed" and (size or "file" in said):
        said += f", {_amount(size, 'byte')}"
    return f"{_VERBS[what]} {said}"


def entries_of(preview: JsonObject, what: str) -> list[JsonObject]:
    found = preview.get(what)
    if not isinstance(found, list):
        return []
    return [{"path": None, **e} if isinstance(e, dict) else {"path": e} for e in found]


def is_shown(key: str, value: Any) -> bool:
    """Return True if the functions of this module, such as `preview_in_words`, can describe a field
    of a preview.

    `key` is the field's key, and `value` is its value. Return False if the key is unknown, or if
    the value does not have the expected form.
    """
    if key == "counts":
        return isinstance(value, dict) and _KNOWN_COUNTS.issuperset(value)
    if key == "directory":
        return isinstance(value, str)
    if key in (*SIGNS, "missing", "kept", "executed"):
        return isinstance(value, list)
    return key in KNOWN_OF_ALL


def entry_facts(entry: JsonObject) -> Iterator[str]:
    if "kind" in entry or state_of(entry, "after"):
        yield _kind(entry, "changed")
    if "size" in entry:
        yield _amount(number_of(entry["size"]), "byte")
    if "before" not in entry and _can_run(entry):
        yield "can be executed"
    yield from _differences(state_of(entry, "before"), state_of(entry, "after"))
    yield from (words for mark, words in _MARKS.items() if entry.get(mark))
    if "links" in entry and entry["links"] != 1:
        others = number_of(entry["links"]) - 1
        yield f"stays under {_amount(others, 'other name')}"
    if "other_names" in entry:
        yield f"also changed under {_amount(number_of(entry['other_names']), 'other name')}"
    if "conflict" in entry:
        yield visible(f"in conflict: {entry['conflict']}")
    if "path_base64" in entry:
        yield "its name is not UTF-8"


def _differences(before: JsonObject, after: JsonObject) -> Iterator[str]:
    sizes = [number_of(state.get("size")) for state in (before, after) if "size" in state]
    if sizes:
        yield " → ".join(f"{size:,}" for size in dict.fromkeys(sizes)) + " bytes"
    modes = [str(state["mode"]) for state in (before, after) if "mode" in state]
    if len(set(modes)) > 1:
        yield visible("mode " + " → ".join(modes))
    kinds = [str(state["kind"]) for state in (before, after) if "kind" in state]
    if len(set(kinds)) > 1:
        yield visible(" → ".join(kinds))
    targets = [str(state["target"]) for state in (before, after) if "target" in state]
    if targets:
        yield visible("leads to " + " → ".join(dict.fromkeys(targets)))


def _can_run(entry: JsonObject) -> bool:
    try:
        return entry.get("kind") == "file" and bool(int(str(entry.get("mode")), 8) & 0o111)
    except ValueError:
        return False


def state_of(entry: JsonObject, key: str) -> JsonObject:
    found = entry.get(key)
    return found if isinstance(found, dict) else {}


def _kind(entry: JsonObject, what: str) -> str:
    kind = entry.get("special") if entry.get("kind") == "other" else entry.get("kind")
    if kind is None:
        return "file" if what == "changed" else "entry"
    return visible(str(kind))


def _amount(number: int, what: str) -> str:
    words = what if number == 1 else _PLURALS.get(what, f"{what}s")
    return f"{number:,} {words}"


def number_of(value: Any) -> int:
    return value if type(value) is int else 0


def rest_of(entry: JsonObject) -> JsonObject:
    """Return the parts of a preview's entry that `entry_facts` does not describe."""
    rest = {key: value for key, value in entry.items() if key not in _KNOWN_OF_ONE}
    return rest | {
        key: entry[key]
        for key in ("before", "after")
        if key in entry and not _KNOWN_OF_STATE.issuperset(state_of(entry, key) or {"": 0})
    }
