"""What a call will change, as its approver reads it: counts in words, a line a file, its diff.

Names, targets of links and contents are strangers'. Invariant: on each line what is ours comes
first, so that no name can pass for a size; what has no known form is shown whole, as JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from fumehood.cli.escaping import json_line, json_lines, visible
from fumehood.cli.marked_lines import INDENT, MARK, Kind, Line, plain, theirs, warning
from fumehood.core.json_types import JsonObject

_SIGNS = {"added": "+", "changed": "~", "removed": "-"}
_VERBS = {"added": "adds", "changed": "changes", "removed": "removes"}
_PLURALS = {"directory": "directories", "entry": "entries"}
_KNOWN_OF_ALL = frozenset({*_SIGNS, "missing", "kept", "counts", "truncated", "would_fail"})
_KNOWN_COUNTS = frozenset({*_SIGNS, "removed_bytes"})
_KNOWN_OF_ONE = frozenset(
    {
        "path", "path_base64", "kind", "special", "mode", "size", "sha256", "links", "unread",
        "target", "target_base64", "before", "after", "other_names", "diff", "diff_truncated",
        "diff_coarse", "binary", "too_large",
    }
)  # fmt: skip
_KNOWN_OF_STATE = frozenset({"mode", "size", "sha256"})
_MARKS = {
    "unread": "cannot be read",
    "binary": "no text",
    "too_large": "too large to compare",
}


def preview_lines(preview: JsonObject, columns: int) -> Iterator[Line]:
    """All of what the engine computed."""
    if "would_fail" in preview:
        said = visible(str(preview["would_fail"]))
        yield from warning(f"The call would fail: {said}", columns)
    if not _KNOWN_OF_ALL.isdisjoint(preview):
        yield from plain(INDENT + preview_in_words(preview), columns, "head")
    for what, sign in _SIGNS.items():
        for entry in _entries(preview, what):
            yield from _entry(sign, entry, columns)
    for entry in _entries(preview, "missing"):
        yield from plain(f"{INDENT}? is not there: {visible(str(entry['path']))}", columns)
    for entry in _entries(preview, "kept"):
        words = f"{INDENT}! stays, {visible(str(entry.get('why')))}: {visible(str(entry['path']))}"
        yield from warning(words, columns)
    rest = {key: value for key, value in preview.items() if not _is_shown(key, value)}
    if rest:
        yield from _as_json("in all", rest, columns)
    if preview.get("truncated"):
        yield Line("There is more than could be listed.", "warning")


def preview_in_words(preview: JsonObject) -> str:
    """How much is added, changed and removed, such as `removes 1 file, 7 bytes`."""
    parts = [words for what in _SIGNS if (words := _how_much(preview, what))]
    return "; ".join(parts) or "changes nothing"


def _how_much(preview: JsonObject, what: str) -> str:
    listed = _entries(preview, what)
    counts = preview.get("counts")
    counts = counts if isinstance(counts, dict) else {}
    in_all = max(_number(counts.get(what)), len(listed))
    if in_all == 0:
        return ""
    if in_all > len(listed):
        said = _amount(in_all, "entry")
    else:
        kinds = Counter(_kind(entry, what) for entry in listed)
        said = ", ".join(_amount(number, kind) for kind, number in kinds.items())
    size = sum(_number(entry.get("size")) for entry in listed)
    if what == "removed":
        size = max(_number(counts.get("removed_bytes")), size)
    if what != "changed" and (size or "file" in said):
        said += f", {_amount(size, 'byte')}"
    return f"{_VERBS[what]} {said}"


def _entries(preview: JsonObject, what: str) -> list[JsonObject]:
    found = preview.get(what)
    if not isinstance(found, list):
        return []
    return [{"path": None, **e} if isinstance(e, dict) else {"path": e} for e in found]


def _is_shown(key: str, value: Any) -> bool:
    """Whether this part of a preview has the form that was shown in words."""
    if key == "counts":
        return isinstance(value, dict) and _KNOWN_COUNTS.issuperset(value)
    if key in (*_SIGNS, "missing", "kept"):
        return isinstance(value, list)
    return key in _KNOWN_OF_ALL


def _entry(sign: str, entry: JsonObject, columns: int) -> Iterator[Line]:
    kinds: dict[str, Kind] = {"+": "added", "-": "removed"}
    facts = ", ".join(_facts(entry)) or "entry"
    said = f"{facts}: {visible(str(entry['path']))}"
    yield from plain(f"{INDENT}{sign} {said}", columns, kinds.get(sign, "plain"))
    if "target" in entry:
        yield from plain(f"{INDENT * 3}leads to: {visible(str(entry['target']))}", columns)
    rest = {key: value for key, value in entry.items() if key not in _KNOWN_OF_ONE}
    rest |= {
        key: entry[key]
        for key in ("before", "after")
        if key in entry and not _KNOWN_OF_STATE.issuperset(_state(entry, key) or {"": 0})
    }
    if rest:
        yield from plain(f"{INDENT * 3}besides: {json_line(rest)}", columns)
    diff = entry.get("diff")
    if isinstance(diff, str):
        yield from _diff(diff, columns)
    if entry.get("diff_coarse"):
        words = "Too large to compare line by line: removed and added as a whole."
        yield from warning(f"{INDENT * 3}{words}", columns)
    if entry.get("diff_truncated"):
        yield from warning(f"{INDENT * 3}There is more of this diff than is shown.", columns)


def _facts(entry: JsonObject) -> Iterator[str]:
    if "kind" in entry or _state(entry, "after"):
        yield _kind(entry, "changed")
    if "size" in entry:
        yield _amount(_number(entry["size"]), "byte")
    yield from _differences(_state(entry, "before"), _state(entry, "after"))
    yield from (words for mark, words in _MARKS.items() if entry.get(mark))
    if "links" in entry and entry["links"] != 1:
        others = _number(entry["links"]) - 1
        yield f"stays under {_amount(others, 'other name')}"
    if "other_names" in entry:
        yield f"also changed under {_amount(_number(entry['other_names']), 'other name')}"
    if "path_base64" in entry:
        yield "its name is no UTF-8"


def _differences(before: JsonObject, after: JsonObject) -> Iterator[str]:
    sizes = [_number(state.get("size")) for state in (before, after) if "size" in state]
    if sizes:
        yield " → ".join(f"{size:,}" for size in dict.fromkeys(sizes)) + " bytes"
    modes = [str(state["mode"]) for state in (before, after) if "mode" in state]
    if len(set(modes)) > 1:
        yield visible("mode " + " → ".join(modes))


def _state(entry: JsonObject, key: str) -> JsonObject:
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


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _diff(diff: str, columns: int) -> Iterator[Line]:
    kinds: dict[str, Kind] = {"+": "added", "-": "removed"}
    for line in diff.removesuffix("\n").split("\n"):
        yield from theirs(line, columns, kinds.get(line[:1], "theirs"))


def _as_json(name: str, value: JsonObject, columns: int) -> Iterator[Line]:
    shown = json_line(value)
    if len(shown) <= columns - len(name) - len(MARK):
        yield from plain(f"{INDENT}{name}: {shown}", columns)
        return
    yield from plain(INDENT + name, columns)
    yield from theirs(json_lines(value), columns)
