"""Changes of a project for people and for `git apply`.

Host side, pure functions. They can take seconds, so they are called in a thread. *Source*:
git-diff(1), "Generating patch text with -p".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fumehood.core.json_types import JsonObject
from fumehood.executors.effects import (
    MAX_DIFF_BYTES,
    MAX_STEPS,
    Diff,
    shown_changes,
    text_of,
    unified,
)
from fumehood.executors.workspace_guest import MAX_LISTED
from fumehood.projects.tree import Entry
from fumehood.projects.writing import Change

MAX_PATCH_BYTES = 4 << 20
"""Bytes of a patch. It ends before the first file that does not fit."""

SHOWN_PATCH_BYTES = 256 * 1024
"""Bytes of all diffs together that an approver is shown; those that do not fit are named."""

MAX_ALL_STEPS = 100 * MAX_STEPS
"""Maximum number of line comparisons for all diffs of a project together: about 15 s."""

LINK_MODE, RUN_MODE, FILE_MODE = "120000", "100755", "100644"

Texts = Mapping[str, bytes]


class _Diffs:
    """Makes diffs. Once they have taken `MAX_ALL_STEPS`, each shows its file as one change."""

    def __init__(self) -> None:
        self._steps_left = MAX_ALL_STEPS

    def of(self, before: str, after: str, max_bytes: int) -> Diff:
        diff = unified(before, after, max_bytes, min(MAX_STEPS, self._steps_left))
        self._steps_left -= diff.steps
        return diff


def patch_of(changes: Sequence[Change], old: Texts, new: Texts) -> tuple[str, bool]:
    """Return a patch, and whether files are missing in it or shown without content. `old` and `new`
    have the contents of files that can be shown.
    """
    parts: list[str] = []
    room = MAX_PATCH_BYTES
    is_cut = False
    diffs = _Diffs()
    for change in changes:
        text, is_whole = _file_patch(change, old, new, diffs)
        room -= len(text.encode())
        if room < 0:
            return "".join(parts), True
        is_cut = is_cut or not is_whole
        parts.append(text)
    return "".join(parts), is_cut


def listed(changes: Sequence[Change]) -> list[JsonObject]:
    """Return each change as path, kind and size; two with the same content are a renaming."""
    gone = {
        change.before: change.path
        for change in changes
        if change.after is None and change.before is not None
    }
    moved: dict[str, str] = {}
    for change in changes:
        if change.before is None and change.after in gone:
            moved[change.path] = gone.pop(change.after)
    items: list[JsonObject] = []
    for change in changes:
        if change.path in moved.values():
            continue
        entry = change.after or change.before
        assert entry is not None
        item: JsonObject = {
            "path": change.path,
            "change": _kind(change),
            "bytes": max(0, entry.size),
        }
        if change.path in moved:
            item |= {"change": "renamed", "old_path": moved[change.path]}
        items.append(item)
    return items


def shown(changes: Sequence[Change], old: Texts, new: Texts, directory: str) -> JsonObject:
    """Return the changes in the form of previews, for the human who decides."""
    added: list[JsonObject] = []
    changed: list[JsonObject] = []
    removed: list[JsonObject] = []
    room = SHOWN_PATCH_BYTES
    diffs = _Diffs()
    for change in changes[:MAX_LISTED]:
        before, after = change.before, change.after
        diff = _shown_diff(change, old, new, diffs)
        room -= len(str(diff.get("diff", "")).encode())
        if room < 0:
            diff = {"too_large": True}
        if after is None:
            assert before is not None
            removed.append({"path": change.path, **_facts(before), **diff})
        elif before is None:
            added.append({"path": change.path, **_facts(after), **diff})
        else:
            sides = {"before": _facts(before), "after": _facts(after)}
            changed.append({"path": change.path, **sides, **diff})
    gone = [change.before for change in changes if change.after is None and change.before]
    result = shown_changes(
        added=added, changed=changed, removed=removed, count=len(gone),
        size=sum(max(0, one.size) for one in gone), truncated=len(changes) > MAX_LISTED,
    )  # fmt: skip
    result["counts"] |= {
        "added": sum(one.before is None for one in changes),
        "changed": sum(None not in (one.before, one.after) for one in changes),
    }
    return {"directory": directory, **result}


def _kind(change: Change) -> str:
    before, after = change.before, change.after
    if before is None:
        return "added"
    if after is None:
        return "deleted"
    same = (before.size, before.digest) == (after.size, after.digest)
    return "mode" if same else "modified"


def _facts(entry: Entry) -> JsonObject:
    if entry.is_link:
        return {"kind": "link", "target": entry.digest}
    return {
        "kind": "file", "mode": "0755" if entry.can_run else "0644", "size": entry.size,
        "sha256": entry.digest,
    }  # fmt: skip


def _content(entry: Entry | None, path: str, texts: Texts) -> bytes | None:
    """Return what git compares of one side; None if it cannot be shown."""
    if entry is None:
        return b""
    return entry.digest.encode() if entry.is_link else texts.get(path)


def _shown_diff(change: Change, old: Texts, new: Texts, diffs: _Diffs) -> JsonObject:
    before = _content(change.before, change.path, old)
    after = _content(change.after, change.path, new)
    if before is None or after is None:
        return {"too_large": True}
    texts = [text_of(before), text_of(after)]
    if None in texts:
        return {"binary": True}
    diff = diffs.of(texts[0] or "", texts[1] or "", MAX_DIFF_BYTES)
    marks = {"diff_truncated": diff.is_truncated, "diff_coarse": diff.is_coarse}
    return {"diff": diff.text, **{mark: True for mark, is_set in marks.items() if is_set}}


def _file_patch(change: Change, old: Texts, new: Texts, diffs: _Diffs) -> tuple[str, bool]:
    """Return one file's part of a patch, and whether it is complete."""
    before, after = change.before, change.after
    if before is not None and after is not None and before.is_link != after.is_link:
        parts = [_file_patch(Change(change.path, before, None), old, new, diffs)]
        parts.append(_file_patch(Change(change.path, None, after), old, new, diffs))
        return "".join(text for text, _ in parts), all(is_whole for _, is_whole in parts)
    lines = list(_head(change))
    sides = [
        _content(before, change.path, old),
        _content(after, change.path, new),
    ]
    if before is not None and after is not None and before.digest == after.digest:
        return "".join(lines), True
    names = [
        "/dev/null" if entry is None else _named(side, change.path)
        for side, entry in (("a", before), ("b", after))
    ]
    texts = [text_of(side) if side is not None else None for side in sides]
    if texts[0] is None or texts[1] is None:
        return "".join([*lines, f"Binary files {names[0]} and {names[1]} differ\n"]), False
    diff = diffs.of(texts[0], texts[1], MAX_PATCH_BYTES)  # more than two shown files can take
    if diff.text:
        tab = "\t" if " " in change.path else ""
        lines += [f"--- {names[0]}{tab}\n", f"+++ {names[1]}{tab}\n", diff.text]
    return "".join(lines), True


def _head(change: Change) -> Iterator[str]:
    path, before, after = change.path, change.before, change.after
    yield f"diff --git {_named('a', path)} {_named('b', path)}\n"
    if before is None and after is not None:
        yield f"new file mode {_mode(after)}\n"
    elif after is None and before is not None:
        yield f"deleted file mode {_mode(before)}\n"
    elif before is not None and after is not None and _mode(before) != _mode(after):
        yield f"old mode {_mode(before)}\nnew mode {_mode(after)}\n"


def _mode(entry: Entry) -> str:
    return LINK_MODE if entry.is_link else RUN_MODE if entry.can_run else FILE_MODE


def _named(side: str, path: str) -> str:
    """Return a path as git writes it: in quotes if it has characters that would confuse."""
    name = f"{side}/{path}"
    if name.isprintable() and not set('"\\') & set(name):
        return name
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in name.encode()
    )
    return f'"{escaped}"'
