"""An approval as its approver reads it: whole, and nothing in it can pass for something else.

What is shown was written by a model or by whoever speaks to it. Invariants: every argument is
shown to its end; each line of a stranger's begins with a mark that he cannot write at a line's
start, also where the line is folded; characters that a terminal obeys, that show nothing, or that
turn the direction of reading are shown as what they are, and named.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from fumehood.approvals.model import Approval, ApprovalState, RememberedRule
from fumehood.cli.escaping import escapes, json_line, json_lines, visible
from fumehood.cli.marked_lines import INDENT, Line, folded, plain, theirs, warning
from fumehood.cli.preview_view import preview_lines
from fumehood.core.json_types import JsonObject

MAX_NAMED = 8

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


def approval_lines(
    approval: Approval, now: datetime, columns: int, *, session_is_over: bool = False
) -> list[Line]:
    """All of it, folded to so many columns. `session_is_over` is what is known of its session."""
    lines = [
        Line(f"{visible(approval.id)}  {approval.state}", "head"),
        *(_field(name, value, columns) for name, value in _facts(approval, now)),
        Line(""),
        Line("arguments", "head"),
        *_arguments(approval.arguments, columns),
    ]
    if session_is_over:
        said = "Its session has ended, and its files are gone: after a yes the call would fail."
        lines += [Line(""), *warning(said, columns)]
    if approval.asked_arguments is not None:
        asked = _arguments(approval.asked_arguments, columns)
        lines += [Line(""), Line("as it was asked, before an edit", "head"), *asked]
    if approval.preview is not None:
        lines += [
            Line(""),
            Line("what will change", "head"),
            *preview_lines(approval.preview, columns),
        ]
    if approval.decisions:
        lines += [Line(""), Line("decisions", "head"), *_decisions(approval, columns)]
    hidden = _hidden_in(approval)
    if hidden:
        said = f"Shown escaped, since it is not what it seems: {hidden}"
        lines += [Line(""), *warning(said, columns)]
    return lines


def rule_lines(rule: RememberedRule, columns: int) -> list[Line]:
    """A remembered rule, before it is saved or afterwards."""
    who = rule.principal_id + (f" as agent {rule.agent_id}" if rule.agent_id else "")
    until = f"until {rule.expires_at:%Y-%m-%d %H:%M} UTC" if rule.expires_at else "while it lasts"
    uses = "any number of times" if rule.uses_left is None else f"{rule.uses_left} more times"
    scope = f"in session {rule.session_id}, {until}" if rule.session_id else until
    lines = [
        _field("allows", f"{rule.tool}, {uses}", columns),
        _field("to", who, columns),
        _field("scope", scope, columns),
    ]
    if rule.arguments:
        return [*lines, Line("where these are equal", "head"), *_arguments(rule.arguments, columns)]
    return [*lines, Line("WHATEVER ITS ARGUMENTS ARE", "warning")]


def one_line(value: str, columns: int) -> str:
    """The beginning of a stranger's text, for a table."""
    shown = visible(value)
    return shown if len(shown) <= columns else shown[: columns - 1] + "…"


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
    yield "because", approval.rule + (f": {approval.reason}" if approval.reason else "")
    if approval.quorum > 1 or approval.approvers:
        who = f" of {', '.join(approval.approvers)}" if approval.approvers else ""
        yield "needs", f"{approval.quorum} yes{who} ({len(approval.counted)} so far)"
    if approval.stuck is not None:
        yield "stuck", approval.stuck
    yield "made", f"{approval.created_at:%Y-%m-%d %H:%M:%S} UTC"
    if approval.state is ApprovalState.PENDING:
        yield "expires", f"{approval.expires_at:%H:%M:%S} UTC ({ago(approval.expires_at, now)})"
    if approval.code is not None:
        yield "ended", approval.code
    if approval.changed:
        yield "changed", ", ".join(approval.changed)
    if approval.superseded_by is not None:
        yield "asked again", approval.superseded_by
    yield "version", str(approval.version)
    yield "call", approval.call_id


def ago(moment: datetime, now: datetime) -> str:
    """How far away a moment is: `in 5 m`, `2 h ago`."""
    seconds = int((moment - now).total_seconds())
    size = abs(seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if size >= 2 * length:
            shown = f"{size // length} {unit}"
            break
    else:
        shown = f"{size} s"
    return f"in {shown}" if seconds >= 0 else f"{shown} ago"


def _field(name: str, value: str, columns: int) -> Line:
    return Line("\n".join(folded(f"{name + ':':<13}{visible(value)}", columns, indent=" " * 13)))


def _arguments(arguments: JsonObject, columns: int) -> Iterator[Line]:
    if not arguments:
        yield Line(f"{INDENT}none")
    for name, value in arguments.items():
        yield from _value(_name(name), value, columns)


def _name(name: str) -> str:
    """An argument's name; in quotes where it could pass for one with a value behind it."""
    return name if _PLAIN_NAME.fullmatch(name) else json_line(name)


def _value(name: str, value: Any, columns: int) -> Iterator[Line]:
    """A text of several lines as those; all else as JSON."""
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
            marks.append("of what it was before an edit")
        said = f": {one.reason}" if one.reason else ""
        text = f"{one.at:%H:%M:%S} {one.approver} ({', '.join(marks)}){said}"
        yield from plain(INDENT + visible(text), columns)


def _hidden_in(approval: Approval) -> str:
    """The names of characters that are shown escaped, with how many there are of each."""
    found: Counter[str] = Counter()
    shown = [approval.arguments, approval.asked_arguments, approval.preview]
    for text in _texts([*shown, approval.reason, approval.tool]):
        found.update(char for char, seen in escapes(text, breaks=True) if seen != char)
    named = [
        f"U+{ord(char):04X} {unicodedata.name(char, 'control character')} ×{count}"
        for char, count in found.most_common(MAX_NAMED)
    ]
    return ", ".join(named) + (", …" if len(found) > MAX_NAMED else "")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included. Iterative: its depth is a stranger's choice."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item
