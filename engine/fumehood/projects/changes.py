"""Finds the changes in a session since its project was copied into it, and shows them to people.

Host side. The guest reports which files differ. This module reads and hashes their contents, so
that exactly the same contents are shown, approved and written. Invariants:

* `digest_of` covers every path that would be written or deleted, with its entries before and after
  the change.
* A diff shows the old text of a host's file only if the file is unchanged since it was copied or
  last written. So no session can read later changes on the host.

Patches have the format of `git apply`. To make a patch can take seconds, so it is done in a thread.
*Source*: git-diff(1), "Generating patch text with -p".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
from pydantic import Field

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.json_types import JsonObject
from fumehood.executors.claims import Claim
from fumehood.executors.effects import (
    MAX_DIFF_BYTES,
    MAX_STEPS,
    Diff,
    Sha256,
    shown_changes,
    text_of,
    unified,
)
from fumehood.executors.workspace_guest import (
    DIRECTORY,
    LIMITS,
    LINK,
    MAX_LISTED,
    NotRead,
    Piece,
    Row,
    answer_of,
    ask,
    contents,
    not_as_agreed,
    scan,
)
from fumehood.projects.executed import executed_by
from fumehood.projects.rules import (
    FILE_NAME,
    GIT,
    MAX_RULES_BYTES,
    IgnoreRules,
    TooManyRules,
    git_directories,
    is_never,
    plain,
    plain_names,
)
from fumehood.projects.tree import Entry, Tree, link_fault
from fumehood.projects.writing import Change
from fumehood.sandbox.wall import Lease

SHOWN_BYTES = 16 << 20
"""Maximum total size in bytes of the file contents that are kept in memory to be shown. All other
contents are only hashed.
"""

Write = Callable[[str, bytes], Awaitable[None]]


@dataclass(slots=True)
class Baseline:
    """The state of a project when it was copied into a session. After changes are written back, the
    baseline is updated with them.
    """

    tree: Tree
    rules: Mapping[str, str]
    """Directory → the text of its `.gitignore` file."""
    everything: bool
    """Whether everything was copied, even what `.gitignore` files exclude."""
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path → the version and the digest of the file in the session. Not every file has an entry."""
    applied: frozenset[str] = frozenset()
    """The paths in `tree` whose entries come from changes that were written back, and not from the
    copy.
    """

    def content(self) -> bytes:
        """Return the baseline as JSON, from which `parse` restores it. Only the field `versions` is
        not included.
        """
        tree = [[path, one.size, one.can_run, one.digest] for path, one in self.tree.items()]
        told = {"tree": tree, "rules": dict(self.rules), "everything": self.everything}
        told["applied"] = sorted(self.applied)
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, content: bytes) -> Baseline:
        told = json.loads(content)
        tree = {path: Entry(*rest) for path, *rest in told["tree"]}
        applied = frozenset(told.get("applied", ()))  # old engine versions did not store it
        return cls(tree, told["rules"], told["everything"], applied=applied)


class _Digests(Claim):
    digests: list[Sha256 | None] = Field(max_length=MAX_LISTED)


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes in a session (`changes`), sorted by path.

    `directories` are the paths of all directories in the session's workspace, and `present` are the
    paths of everything else in it.
    """

    changes: Sequence[Change]
    directories: frozenset[str]
    present: frozenset[str]
    rows: Mapping[str, Row]
    """Path → the guest's row for each new or changed file."""
    texts: Mapping[str, bytes]
    """Path → the content of each new or changed file, if it is small enough to be shown."""
    unseen: Sequence[str]
    """Changed paths that are never written to the host: links that lead out of the project, special
    files, files in hidden repositories, and names that a project can never contain.
    """


def digest_of(changes: Sequence[Change]) -> str:
    """Return one SHA-256 for all changes. It covers each path, with its entries before and after
    the change.
    """
    total = hashlib.sha256(b"fumehood.project.1\n")
    for one in changes:
        row = [one.path, *(_row(entry) for entry in (one.before, one.after))]
        total.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return total.hexdigest()


def _row(entry: Entry | None) -> list[Any] | None:
    return None if entry is None else [entry.size, entry.can_run, entry.digest]


async def changes_of(
    source: Lease, baseline: Baseline, limiter: anyio.CapacityLimiter | None = None
) -> Changes:
    """Return the differences between the workspace of the session `source` and its baseline.

    `limiter` limits how many threads evaluate `.gitignore` rules at the same time.

    Raises:
        NotRead: there are too many files or rules, or a file was changed while it was read.
        EngineError: the guest failed.
    """
    skip = [GIT]
    if not baseline.everything:
        # Files of the baseline must stay in the scan, because a file without a row would count as
        # deleted.
        copied = {name for path in baseline.tree for name in path.split("/")}
        skip += (name for name in plain_names(await _top_rules(source)) if name not in copied)
    rows, unseen = await scan(source, links=True, skip=skip)
    present = {row[0] for row in rows if row[1] != DIRECTORY}
    repositories = git_directories(row[0] for row in rows)
    never = [row[0] for row in rows if is_never(row[0])]
    rows = [row for row in rows if not is_never(row[0])]
    differing = await _differing(source, baseline, rows)
    if not baseline.everything:
        rules = await _rules(source, baseline, rows, {row[0] for row in differing})
        # A session's programs can write rules whose evaluation takes seconds, hence the limiter.
        differing = await anyio.to_thread.run_sync(
            _not_left_out, baseline, rules, differing, abandon_on_cancel=True, limiter=limiter
        )
    bad = {
        path
        for path, size, _, target in differing
        if plain(path).startswith(repositories) or (size == LINK and link_fault(path, target))
    }
    differing = [row for row in differing if row[0] not in bad]
    after, texts = await _read(source, differing)
    found = [Change(path, baseline.tree.get(path), entry) for path, entry in after.items()]
    found += [Change(path, one, None) for path, one in baseline.tree.items() if path not in present]
    return Changes(
        sorted((one for one in found if one.before != one.after), key=lambda one: one.path),
        frozenset(row[0] for row in rows if row[1] == DIRECTORY),
        frozenset(present),
        {row[0]: row for row in differing if row[1] >= 0},
        texts,
        [*(path for path in never if not is_never(path.rpartition("/")[0])), *sorted(bad), *unseen],
    )


async def _top_rules(source: Lease) -> str:
    """Return the text of the `.gitignore` file in the top directory of the workspace, or "" if it
    cannot be read.
    """
    asked = {"do": "read", "path": FILE_NAME, "offset": 0, "length": MAX_READ_BYTES}
    piece = (await ask(source, asked, LIMITS, Piece)).value
    return piece.content.decode("utf-8", "replace") if piece is not None else ""


async def _rules(
    source: Lease, baseline: Baseline, rows: Sequence[Row], differing: Collection[str]
) -> dict[str, str]:
    """Return the `.gitignore` rules that now apply in the workspace. The result maps each directory
    to the text of its `.gitignore` file.

    `rows` are the guest's entries for all files. `differing` are the paths that differ from the
    baseline. A `.gitignore` file is read only if it differs or is new.

    Raises:
        NotRead: the `.gitignore` files to read are too large, or one was changed while it was read.
    """
    texts: dict[str, str] = {}
    new: list[Row] = []
    for row in rows:
        path, size = row[0], row[1]
        directory, _, name = path.rpartition("/")
        if name != FILE_NAME or size < 0:
            continue
        if path not in differing and directory in baseline.rules:
            texts[directory] = baseline.rules[directory]
        else:
            new.append(row)
    if sum(row[1] for row in new) > MAX_RULES_BYTES:
        raise NotRead(str(TooManyRules()))
    contents_of: dict[str, bytes] = {}
    async for path, piece in contents(source, new):
        contents_of[path] = contents_of.get(path, b"") + piece
    for path, content in contents_of.items():
        texts[path.rpartition("/")[0]] = content.decode("utf-8", "replace")
    return texts


def _not_left_out(
    baseline: Baseline, texts: Mapping[str, str], differing: Sequence[Row]
) -> list[Row]:
    """Return `differing` without the new files that `.gitignore` rules leave out. A file is new if
    the baseline does not contain it.

    `texts` maps each directory to the text of its `.gitignore` file.

    Raises:
        NotRead: the evaluation of the rules would take too much time or memory.
    """
    rules = IgnoreRules()
    try:
        for directory, text in texts.items():
            rules.add(directory, text)
        return [
            row
            for row in differing
            if row[0] in baseline.tree or not rules.leave_out(row[0], is_directory=False)
        ]
    except TooManyRules as error:
        raise NotRead(str(error)) from None


async def stage(source: Lease, found: Changes, wanted: Sequence[Change], write: Write) -> None:
    """Read the new and changed files among `wanted`, and pass their contents to `write`.

    `write` gets the path of a file and a piece of its content. If a file is empty, it gets one
    empty piece. `found` are all changes in the session, which include `wanted`.

    Raises:
        NotRead: a file has changed since `found` was made.
        EngineError: the guest failed.
    """
    files = {
        one.path: one.after for one in wanted if one.after is not None and not one.after.is_link
    }
    for path in files.keys() & found.texts.keys():  # these contents were hashed already
        await write(path, found.texts[path])
    expected = {path: entry for path, entry in files.items() if path not in found.texts}
    digests = {path: hashlib.sha256() for path in expected}
    async for path, piece in contents(source, [found.rows[path] for path in expected]):
        digests[path].update(piece)
        await write(path, piece)
    for path, entry in expected.items():
        if digests[path].hexdigest() != entry.digest:
            raise NotRead(f"{path} changed while it was read")


async def _read(source: Lease, rows: Sequence[Row]) -> tuple[dict[str, Entry], dict[str, bytes]]:
    """Read the files and links in `rows`, which are entries of the guest's list of files.

    Return two mappings:

    * The path of each file or link → its entry.
    * The path of each file that is small enough to be shown → its content.
    """
    entries: dict[str, Entry] = {}
    texts: dict[str, bytes] = {}
    room = SHOWN_BYTES
    files = {row[0]: row for row in rows if row[1] >= 0}
    for path, size, _, target in rows:
        if size == LINK:
            entries[path] = Entry(LINK, False, target)
    digests = {path: hashlib.sha256() for path in files}
    for path, row in files.items():
        if row[1] == 0:
            texts[path] = b""
    async for path, piece in contents(source, files.values()):
        digests[path].update(piece)
        if files[path][1] <= min(room, MAX_READ_BYTES):
            room -= len(piece)
            texts[path] = texts.get(path, b"") + piece
    for path, digest in digests.items():
        entries[path] = Entry(files[path][1], files[path][2], digest.hexdigest())
    return entries, texts


def _is_same(row: Row, baseline: Baseline) -> bool | None:
    """Return whether a file or link is the same as in the baseline, or None if only a hash of the
    content can tell. `row` is its entry in the guest's list of files.
    """
    path, size, can_run, version = row
    before = baseline.tree.get(path)
    if before is None or (size, can_run) != (before.size, before.can_run):
        return False
    if size == LINK or version == before.digest:  # the version can be the content's hash
        return version == before.digest
    known = baseline.versions.get(path)
    return known[1] == before.digest if version and known and known[0] == version else None


async def _differing(source: Lease, baseline: Baseline, rows: Sequence[Row]) -> list[Row]:
    """Return those of `rows` whose files or links differ from the baseline, or could not be hashed.
    `rows` are entries in the guest's list of files.
    """
    unknown: list[Row] = []
    differing: list[Row] = []
    for row in rows:
        if row[1] == DIRECTORY:
            continue
        is_same = _is_same(row, baseline)
        if is_same is None:
            unknown.append(row)
        elif not is_same:
            differing.append(row)
    for at in range(0, len(unknown), MAX_LISTED):
        some = unknown[at : at + MAX_LISTED]
        asked: JsonObject = {"do": "digest", "paths": [row[0] for row in some]}
        digests = (await answer_of(source, asked, _Digests)).digests
        if len(digests) != len(some):
            raise not_as_agreed()
        for row, digest in zip(some, digests, strict=True):
            path, _, _, version = row
            if version and digest is not None:
                baseline.versions[path] = (version, digest)
            if digest != baseline.tree[path].digest:
                differing.append(row)
    return sorted(differing)


# -- changes as people and `git apply` read them ----------------------------------------------

MAX_PATCH_BYTES = 4 << 20
"""Maximum size of a patch in bytes. If the diff of a file does not fit, the patch only names the
file.
"""

SHOWN_PATCH_BYTES = 256 * 1024
"""Maximum total size in bytes of the diffs that an approver sees. If the diff of a file does not
fit, only the name of the file is shown.
"""

MAX_ALL_STEPS = 100 * MAX_STEPS
"""Maximum number of line comparisons for all diffs of a project together. This many take about 15
s.
"""

LINK_MODE, RUN_MODE, FILE_MODE = "120000", "100755", "100644"

Texts = Mapping[str, bytes]


class _Diffs:
    """Makes the diffs of one project. After `MAX_ALL_STEPS` line comparisons in total, each further
    diff shows its file as a single large change.
    """

    def __init__(self) -> None:
        self._steps_left = MAX_ALL_STEPS

    def of(self, before: str, after: str, max_bytes: int) -> Diff:
        diff = unified(before, after, max_bytes, min(MAX_STEPS, self._steps_left))
        self._steps_left -= diff.steps
        return diff


def patch_of(
    changes: Sequence[Change], conflicts: Collection[str], old: Texts, new: Texts
) -> tuple[str, bool]:
    """Return a patch of the changes, and whether the patch is incomplete. If the change of a file
    cannot be shown, the patch contains only the name of this file, and is incomplete.

    `conflicts` are the paths at which the host's files conflict with the changes. `old` and `new`
    map the paths of files that can be shown to their contents before and after the changes.
    """
    parts: list[str] = []
    room = MAX_PATCH_BYTES
    is_cut = False
    diffs = _Diffs()
    for change in changes:
        text, is_whole = _file_patch(change, conflicts, old, new, diffs)
        size = len(text.encode())
        if size > room:  # the patch only names this file; smaller ones may still fit
            text, is_whole = _file_patch(change, conflicts, {}, {}, diffs)
        else:
            room -= size
        is_cut = is_cut or not is_whole
        parts.append(text)
    return "".join(parts), is_cut


def listed(changes: Sequence[Change]) -> list[JsonObject]:
    """Return each change as JSON with the path, the kind of change and the size. If a deleted file
    and an added file have the same content, they become one change of the kind `renamed`.
    """
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


def shown(
    changes: Sequence[Change], conflicts: Mapping[str, str], old: Texts, new: Texts, directory: str
) -> JsonObject:
    """Return the changes in the form in which approvers see them. `directory` is the project
    directory on the host.

    `conflicts` maps each path at which the host's file conflicts with the change to the reason.
    `old` and `new` map the paths of files that can be shown to their contents before and after the
    changes.
    """
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
        if change.path in conflicts:
            diff = {"conflict": conflicts[change.path]}
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
    executed = [
        {"path": change.path, "by": tool}
        for change in changes[:MAX_LISTED]
        if change.after is not None and (tool := executed_by(change.path)) is not None
    ]
    if executed:
        result["executed"] = executed
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
    """Return the content of a file or link as git's diff shows it, or None if it cannot be shown.

    `entry` is the state of `path` before or after a change. The content of a link is its target. If
    `entry` is None, return b"". `texts` maps the paths of the files that can be shown to their
    contents.
    """
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


def _file_patch(
    change: Change, conflicts: Collection[str], old: Texts, new: Texts, diffs: _Diffs
) -> tuple[str, bool]:
    """Return the section of a patch for one file, and whether this section shows the whole change.

    `conflicts` are the paths at which the host's files conflict with the changes. `old` and `new`
    map the paths of files that can be shown to their contents before and after the changes. `diffs`
    makes the diff.
    """
    before, after = change.before, change.after
    if before is not None and after is not None and before.is_link != after.is_link:
        parts = [_file_patch(Change(change.path, before, None), conflicts, old, new, diffs)]
        parts.append(_file_patch(Change(change.path, None, after), conflicts, old, new, diffs))
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
        # `git apply` refuses a patch with such a line as a whole. So it never applies only the
        # other files.
        what = "Files" if None in sides else "Binary files"
        why = " (in conflict, not shown)" if change.path in conflicts else ""
        return "".join([*lines, f"{what} {names[0]} and {names[1]}{why} differ\n"]), False
    diff = diffs.of(texts[0], texts[1], MAX_PATCH_BYTES)  # no diff of two shown files exceeds it
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
    """Return `side` (`a` or `b`) and the path as git writes them: quoted and escaped if the path
    contains special characters.
    """
    name = f"{side}/{path}"
    if name.isprintable() and not set('"\\') & set(name):
        return name
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in name.encode()
    )
    return f'"{escaped}"'
