"""The display of an approval: complete, and unable to imitate other output.

The text comes from a model or its prompt, so it is untrusted. Invariants:

- Every argument is shown completely.
- Every line of untrusted text starts with a mark that the text cannot write, also where a line is
  folded. On lines that mix both, our words come first, so that no name can pass for a size.
- Control, invisible and direction-changing characters are escaped, and named in a warning.
- A preview of unknown form is shown whole, as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from rich.cells import cell_len, chop_cells

from fumehood.approvals.model import Approval, ApprovalState, RememberedRule
from fumehood.approvals.wording import (
    OUTSIDE,
    SIGNS,
    argument_name,
    context_in,
    effect_heading,
    entries_of,
    entry_facts,
    hidden_in,
    is_outside,
    is_shown,
    rest_of,
)
from fumehood.approvals.wording import ago as ago
from fumehood.approvals.wording import preview_in_words as preview_in_words
from fumehood.core.escaping import json_line, json_lines, visible
from fumehood.core.json_types import JsonObject

Kind = Literal["head", "plain", "theirs", "added", "removed", "warning"]

INDENT = "  "
MARK = "  │ "

BESIDE_FILES = ("printed", "variables", "requests")
"""Parts of a preview besides its files: what a trial has done."""


def approval_lines(approval: Approval, now: datetime, columns: int) -> list[Line]:
    """Lay out a whole approval in `columns`: facts, arguments, effect, decisions and warnings."""
    facts = [
        Line(f"{visible(approval.id)}  {approval.state}", "head"),
        *(_field(name, value, columns) for name, value in _facts(approval, now)),
        Line(""),
    ]
    lines = [Line("arguments", "head"), *_arguments(approval.arguments, columns)]
    if is_outside(approval):
        lines = [*warning(f"{OUTSIDE}.", columns), Line(""), *lines]
    if approval.has_lost_session:
        said = "Its session ended before anybody decided, so this call can no longer run."
        lines += [Line(""), *warning(said, columns)]
    if approval.asked_arguments is not None:
        asked = _arguments(approval.asked_arguments, columns)
        lines += [Line(""), Line("as requested, before an edit", "head"), *asked]
    if (context := context_in(approval.preview)) is not None:
        lines += [Line(""), Line("context", "head"), *_arguments(context, columns)]
    elif approval.preview is not None:
        lines += [
            Line(""),
            Line(effect_heading(approval).lower(), "head"),
            *preview_lines(approval.preview, columns),
        ]
    if approval.decisions:
        lines += [Line(""), Line("decisions", "head"), *_decisions(approval, columns)]
    if hidden := hidden_in(approval):
        said = f"Escaped, because invisible or misleading: {hidden}"
        lines += [Line(""), *warning(said, columns)]
    return facts + lines


def rule_lines(rule: RememberedRule, columns: int) -> list[Line]:
    """Lay out a remembered rule, saved or proposed."""
    who = rule.principal_id + (f" as agent {rule.agent_id}" if rule.agent_id else "")
    until = f"until {rule.expires_at:%Y-%m-%d %H:%M} UTC" if rule.expires_at else "while it lasts"
    uses = "any number of times" if rule.uses_left is None else f"{rule.uses_left} more times"
    where = f"in session {rule.session_id}" if rule.session_id else "in any session"
    lines = [
        _field("allows", f"{rule.tool}, {uses}", columns),
        _field("to", who, columns),
        _field("scope", f"{where}, {until}", columns),
    ]
    if not rule.arguments:
        words = (
            Line("WITH ANY ARGUMENTS", "warning") if rule.any_others else Line("without arguments")
        )
        return [*lines, words]
    head = "if these arguments are equal" + ("" if rule.any_others else " and there are no others")
    lines += [Line(head, "head"), *_arguments(rule.arguments, columns)]
    return [*lines, Line("AND ANY OTHERS", "warning")] if rule.any_others else lines


def _facts(approval: Approval, now: datetime) -> Iterator[tuple[str, str]]:
    yield (
        "tool",
        f"{approval.tool}@{approval.tool_version}"
        + ("  (dangerous)" if approval.dangerous else ""),
    )
    yield "asked by", approval.principal_id
    if approval.agent_id is not None:
        yield "as agent", approval.agent_id
    if approval.session_id is not None:
        yield "in session", approval.session_id
    if names := (approval.binding or {}).get("session_env"):
        yield "with variables", ", ".join(names)
    yield "because", approval.rule + (f": {approval.reason}" if approval.reason else "")
    if approval.quorum > 1 or approval.approvers:
        who = f" from {', '.join(approval.approvers)}" if approval.approvers else ""
        yield "needs", f"{approval.quorum} approvals{who} ({len(approval.counted)} so far)"
    if approval.stuck is not None:
        yield "stuck", approval.stuck
    yield "made", f"{approval.created_at:%Y-%m-%d %H:%M:%S} UTC"
    if approval.state is ApprovalState.PENDING:
        yield "expires", f"{approval.expires_at:%H:%M:%S} UTC ({ago(approval.expires_at, now)})"
        if (at := approval.previewed_at) is not None:
            yield "previewed", f"{at:%H:%M:%S} UTC ({ago(at, now)})"
    if approval.code is not None:
        yield "ended", approval.code
    if approval.changed and not approval.has_lost_session:
        yield "changed", ", ".join(approval.changed)
    yield "version", str(approval.version)
    yield "call", approval.call_id


def _field(name: str, value: str, columns: int) -> Line:
    return Line("\n".join(folded(f"{name + ':':<13}{visible(value)}", columns, indent=" " * 13)))


def _arguments(arguments: JsonObject, columns: int) -> Iterator[Line]:
    if not arguments:
        yield Line(f"{INDENT}none")
    for name, value in arguments.items():
        yield from _value(argument_name(name), value, columns)


def _value(name: str, value: Any, columns: int) -> Iterator[Line]:
    """Show a text of several lines as lines, anything else as JSON."""
    if isinstance(value, str) and "\n" in value:
        yield from plain(f"{INDENT}{name} ({len(value)} characters)", columns)
        yield from theirs(value, columns)
        return
    shown = json_line(value)
    if isinstance(value, dict | list) and len(shown) > columns - len(name) - 2:
        yield from plain(INDENT + name, columns)
        yield from theirs(json_lines(value), columns)
        return
    yield from plain(f"{INDENT}{name}: {shown}", columns)


def _decisions(approval: Approval, columns: int) -> Iterator[Line]:
    for one in approval.decisions:
        marks = [one.decision, one.channel]
        marks += ["edited"] if one.edited else []
        marks += ["SELF-APPROVAL"] if one.is_self_approval else []
        if one.action_digest != approval.action_digest:
            marks.append("before an edit")
        said = f": {one.reason}" if one.reason else ""
        text = f"{one.at:%H:%M:%S} {one.approver} ({', '.join(marks)}){said}"
        yield from plain(INDENT + visible(text), columns)


def _rest(preview: JsonObject, columns: int) -> Iterator[Line]:
    rest = {key: value for key, value in preview.items() if not is_shown(key, value)}
    for name in BESIDE_FILES:
        if name in rest:
            yield from _value(name, rest.pop(name), columns)
    if rest:
        yield from _value("in all", rest, columns)


def preview_lines(preview: JsonObject, columns: int) -> Iterator[Line]:
    """Lay out the whole preview that the engine computed."""
    if "would_fail" in preview:
        said = visible(str(preview["would_fail"]))
        yield from warning(f"The call would fail: {said}", columns)
    if is_shown("directory", directory := preview.get("directory")):
        yield from plain(f"{INDENT}in {visible(str(directory))}", columns, "head")
    if words := preview_in_words(preview):
        yield from plain(INDENT + words, columns, "head")
    for what, sign in SIGNS.items():
        for entry in entries_of(preview, what):
            yield from _entry(sign, entry, columns)
    for entry in entries_of(preview, "missing"):
        yield from plain(f"{INDENT}? missing: {visible(str(entry['path']))}", columns)
    for entry in entries_of(preview, "kept"):
        words = f"{INDENT}! kept, {visible(str(entry.get('why')))}: {visible(str(entry['path']))}"
        yield from warning(words, columns)
    yield from _rest(preview, columns)
    if preview.get("truncated"):
        yield Line("The list is incomplete.", "warning")


def _entry(sign: str, entry: JsonObject, columns: int) -> Iterator[Line]:
    kinds: dict[str, Kind] = {"+": "added", "-": "removed"}
    facts = ", ".join(entry_facts(entry)) or "entry"
    said = f"{facts}: {visible(str(entry['path']))}"
    yield from plain(f"{INDENT}{sign} {said}", columns, kinds.get(sign, "plain"))
    if "target" in entry:
        yield from plain(f"{INDENT * 3}leads to: {visible(str(entry['target']))}", columns)
    if rest := rest_of(entry):
        yield from plain(f"{INDENT * 3}also: {json_line(rest)}", columns)
    if isinstance(diff := entry.get("diff"), str):
        for line in diff.removesuffix("\n").split("\n"):
            yield from theirs(line, columns, kinds.get(line[:1], "theirs"))
    if entry.get("diff_coarse"):
        words = "Too large to compare line by line: removed and added as a whole."
        yield from warning(f"{INDENT * 3}{words}", columns)
    if entry.get("diff_truncated"):
        yield from warning(f"{INDENT * 3}There is more of this diff than is shown.", columns)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text that is safe to print, and the kind that decides its colour."""

    text: str
    kind: Kind = "plain"


def plain(text: str, columns: int, kind: Kind = "plain") -> Iterator[Line]:
    """Lay out our own text; untrusted parts must be escaped already."""
    return (Line(piece, kind) for piece in folded(text, columns, indent=MARK))


def warning(text: str, columns: int) -> Iterator[Line]:
    """Lay out a warning."""
    return plain(text, columns, "warning")


def theirs(text: str, columns: int, kind: Kind = "theirs") -> Iterator[Line]:
    """Lay out untrusted text, with the mark before each line."""
    for line in text.split("\n"):
        for piece in folded(visible(line), columns - len(MARK)):
            yield Line(MARK + piece, kind)


def folded(text: str, columns: int, indent: str = "") -> Iterable[str]:
    """Fold text into pieces that fit; `indent` starts every piece after the first."""
    if len(text) <= columns and cell_len(text) <= columns:
        return [text]
    first = chop_cells(text, columns)[0]
    others = chop_cells(text.removeprefix(first), max(1, columns - cell_len(indent)))
    return [first, *(indent + piece for piece in others)]
