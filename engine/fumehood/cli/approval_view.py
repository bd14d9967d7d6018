"""An approval as its approver reads it: whole, and nothing in it can pass for something else.

What is shown was written by a model or by whoever speaks to it. Invariants: every argument is
shown to its end; each line of a stranger's begins with a mark that he cannot write at a line's
start, also where the line is folded; characters that a terminal obeys, that show nothing, or that
turn the direction of reading are shown as what they are, and named.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from rich.cells import cell_len

from fumehood.model.approval import Approval, ApprovalState, RememberedRule
from fumehood.model.json_types import JsonObject

Kind = Literal["head", "plain", "theirs", "added", "removed", "warning"]

INDENT = "  "
MARK = "  │ "
MIN_COLUMNS = 20
MAX_NAMED = 8
MAX_MARKS_IN_A_ROW = 3
"""Accents on one letter: what languages need. More of them paint over other lines."""

_SHOW_NOTHING = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0}
    | set(range(0x180B, 0x1810))
    | set(range(0xFE00, 0xFE10))
    | set(range(0xE0000, 0xE1000))
)
"""*Source*: Unicode's Default_Ignorable_Code_Point of letters and marks, and the empty braille."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text, safe to print, and how it may be coloured."""

    text: str
    kind: Kind = "plain"


def approval_lines(approval: Approval, now: datetime, columns: int) -> list[Line]:
    """All of it, folded to so many columns."""
    lines = [
        Line(f"{approval.id}  {approval.state}", "head"),
        *(_field(name, value, columns) for name, value in _facts(approval, now)),
        Line(""),
        Line("arguments", "head"),
        *_arguments(approval.arguments, columns),
    ]
    if approval.asked_arguments is not None:
        asked = _arguments(approval.asked_arguments, columns)
        lines += [Line(""), Line("as it was asked, before an edit", "head"), *asked]
    if approval.preview is not None:
        lines += [Line(""), Line("what will change", "head"), *_preview(approval.preview, columns)]
    if approval.decisions:
        lines += [Line(""), Line("decisions", "head"), *_decisions(approval, columns)]
    hidden = _hidden_in(approval)
    if hidden:
        said = f"Shown escaped, since it is not what it seems: {hidden}"
        lines += [Line(""), *_warning(said, columns)]
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


def visible(text: str) -> str:
    """One line of a stranger's text, in which nothing moves, hides or turns anything."""
    return "".join(_visible(text, breaks=False))


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
    return Line("\n".join(_folded(f"{name + ':':<13}{visible(value)}", columns, indent=" " * 13)))


def _arguments(arguments: JsonObject, columns: int) -> Iterator[Line]:
    if not arguments:
        yield Line(f"{INDENT}none")
    for name, value in arguments.items():
        yield from _value(visible(name), value, columns)


def _value(name: str, value: Any, columns: int) -> Iterator[Line]:
    """A text of several lines as those; all else as JSON."""
    if isinstance(value, str) and "\n" in value:
        yield from _plain(f"{INDENT}{name} ({len(value)} characters)", columns)
        yield from _theirs(value, columns)
        return
    shown = visible(json.dumps(value, ensure_ascii=False, allow_nan=False))
    if isinstance(value, dict | list) and len(shown) > columns - len(name) - 2:
        yield from _plain(INDENT + name, columns)
        yield from _theirs(json.dumps(value, ensure_ascii=False, indent=2), columns)
        return
    yield from _plain(f"{INDENT}{name}: {shown}", columns)


def _plain(text: str, columns: int) -> Iterator[Line]:
    return (Line(piece) for piece in _folded(text, columns, indent=MARK))


def _warning(text: str, columns: int) -> Iterator[Line]:
    return (Line(piece, "warning") for piece in _folded(text, columns, indent=MARK))


def _theirs(text: str, columns: int) -> Iterator[Line]:
    for line in text.split("\n"):
        for folded in _folded(visible(line), columns - len(MARK)):
            yield Line(MARK + folded, "theirs")


def _preview(preview: JsonObject, columns: int) -> Iterator[Line]:
    """What the engine computed; names and contents in it are strangers'."""
    if "would_fail" in preview:
        said = visible(str(preview["would_fail"]))
        yield from _warning(f"The call would fail: {said}", columns)
    for kind, sign in (("added", "+"), ("changed", "~"), ("removed", "-")):
        for entry in preview.get(kind) or []:
            yield from _entry(sign, entry if isinstance(entry, dict) else {"path": entry}, columns)
    rest = {
        key: value
        for key, value in preview.items()
        if key not in ("added", "changed", "removed", "would_fail", "truncated")
    }
    if rest:
        yield from _value("in all", rest, columns)
    if preview.get("truncated"):
        yield Line("There is more than could be listed.", "warning")


def _entry(sign: str, entry: JsonObject, columns: int) -> Iterator[Line]:
    facts = {key: value for key, value in entry.items() if key not in ("path", "diff")}
    said = visible(json.dumps(facts, ensure_ascii=False)) if facts else ""
    path = visible(str(entry.get("path")))
    yield from _plain(f"{INDENT}{sign} {path}  {said}".rstrip(), columns)
    diff = entry.get("diff")
    if isinstance(diff, str):
        yield from _diff(diff, columns)


def _diff(diff: str, columns: int) -> Iterator[Line]:
    kinds: dict[str, Kind] = {"+": "added", "-": "removed"}
    for line in diff.removesuffix("\n").split("\n"):
        kind = kinds.get(line[:1], "theirs")
        for folded in _folded(visible(line), columns - len(MARK)):
            yield Line(MARK + folded, kind)


def _decisions(approval: Approval, columns: int) -> Iterator[Line]:
    for one in approval.decisions:
        marks = [one.decision, one.channel]
        marks += ["edited"] if one.edited else []
        marks += ["SELF-APPROVAL"] if one.is_self_approval else []
        if one.action_digest != approval.action_digest:
            marks.append("of what it was before an edit")
        said = f": {one.reason}" if one.reason else ""
        text = f"{one.at:%H:%M:%S} {one.approver} ({', '.join(marks)}){said}"
        yield from _plain(INDENT + visible(text), columns)


def _hidden_in(approval: Approval) -> str:
    """The names of characters that are shown escaped, with how many there are of each."""
    found: Counter[str] = Counter()
    shown = [approval.arguments, approval.asked_arguments, approval.preview]
    for text in _texts([*shown, approval.reason, approval.tool]):
        found.update(char for char, shown in _each(text, breaks=True) if shown != char)
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


def _visible(text: str, *, breaks: bool) -> Iterator[str]:
    return (shown for _, shown in _each(text, breaks=breaks))


def _each(text: str, *, breaks: bool) -> Iterator[tuple[str, str]]:
    """Each character and how it is shown; with `breaks` line ends are no news."""
    marks = 0
    can_carry = False
    for char in text:
        is_mark = unicodedata.category(char) in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        paints_over = is_mark and (not can_carry or marks > MAX_MARKS_IN_A_ROW)
        if (char in "\n\t" and breaks) or (_is_seen(char) and not paints_over):
            yield char, char
        else:
            yield char, f"\\u{{{ord(char):04x}}}"
        can_carry = char.isalpha() or (is_mark and can_carry)


def _is_seen(char: str) -> bool:
    """No control, format, private or separating character but the space, and not empty."""
    return char.isprintable() and ord(char) not in _SHOW_NOTHING


def _folded(text: str, columns: int, indent: str = "") -> Iterable[str]:
    """Pieces that fit; those after the first begin with `indent`."""
    columns = max(columns, MIN_COLUMNS)
    if len(text) <= columns and cell_len(text) <= columns:
        return [text]
    pieces: list[str] = []
    piece, used = "", 0
    for char in text:
        width = cell_len(char)
        if used + width > columns:
            pieces.append(piece)
            piece, used = indent, cell_len(indent)
        piece += char
        used += width
    return [*pieces, piece]
