"""What changed in a session since its project was copied in.

Host side. The guest tells which files differ; the content of those is read and hashed here, so that
what is shown, approved and written is the same. Invariants: `digest` covers every path that would
be written or deleted, with what it was and what it becomes; the old text of a diff is the host's
file only if that is still as it was copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
from pydantic import Field

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.json_types import JsonObject
from fumehood.executors.claims import Claim
from fumehood.executors.effects import Sha256
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
from fumehood.projects.rules import (
    FILE_NAME,
    GIT,
    MAX_RULES_BYTES,
    IgnoreRules,
    TooManyRules,
    git_directories,
    is_never,
    plain_names,
)
from fumehood.projects.tree import Entry, Tree, link_fault
from fumehood.projects.writing import Change
from fumehood.sandbox.wall import Lease

SHOWN_BYTES = 16 << 20
"""Bytes of contents that are kept to be shown. The others are only hashed."""

Write = Callable[[str, bytes], Awaitable[None]]


@dataclass(slots=True)
class Baseline:
    """A project as it was copied into a session."""

    tree: Tree
    rules: Mapping[str, str]
    """Directory → text of its `.gitignore`."""
    everything: bool
    """Whether no rule left anything out."""
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path → version and digest of a file in the session, as far as known."""

    def content(self) -> bytes:
        """Return it in the form that is stored."""
        tree = [[path, one.size, one.can_run, one.digest] for path, one in self.tree.items()]
        told = {"tree": tree, "rules": dict(self.rules), "everything": self.everything}
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, content: bytes) -> Baseline:
        told = json.loads(content)
        tree = {path: Entry(*rest) for path, *rest in told["tree"]}
        return cls(tree, told["rules"], told["everything"])


class _Digests(Claim):
    digests: list[Sha256 | None] = Field(max_length=MAX_LISTED)


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes, by path, and the directories and other paths that the session has."""

    changes: Sequence[Change]
    directories: frozenset[str]
    present: frozenset[str]
    rows: Mapping[str, Row]
    """Path → row of each file that is new or has changed."""
    texts: Mapping[str, bytes]
    """Path → content of what is small enough to be shown."""
    unseen: Sequence[str]
    """Links that lead out, special files, parts of hidden repositories, and what has a name that no
    project has: it is never written.
    """


def digest_of(changes: Sequence[Change]) -> str:
    """Return the hash of all that would be written."""
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
    """Return what differs in a session's workspace. `limiter` is that of threads in which rules are
    compared: a program of the session wrote these, and they may take seconds.

    Raises:
        NotRead: there are too many files, or one changes meanwhile.
        EngineError: the guest failed.
    """
    skip = [GIT]
    if not baseline.everything:
        # Rules leave out no file that was copied in: without its row it would count as deleted.
        copied = {name for path in baseline.tree for name in path.split("/")}
        skip += (name for name in plain_names(await _top_rules(source)) if name not in copied)
    rows, unseen = await scan(source, links=True, skip=skip)
    present = {row[0] for row in rows if row[1] != DIRECTORY}
    repositories = tuple(git_directories({row[0] for row in rows}))
    never = [row[0] for row in rows if is_never(row[0])]
    rows = [row for row in rows if not is_never(row[0])]
    differing = await _differing(source, baseline, rows)
    if not baseline.everything:
        rules = await _rules(source, baseline, rows, {row[0] for row in differing})
        differing = await anyio.to_thread.run_sync(
            _not_left_out, baseline, rules, differing, abandon_on_cancel=True, limiter=limiter
        )
    bad = {
        path
        for path, size, _, target in differing
        if path.startswith(repositories) or (size == LINK and link_fault(path, target))
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
    """Return the text of the workspace's own `.gitignore`, if it has one."""
    asked = {"do": "read", "path": FILE_NAME, "offset": 0, "length": MAX_READ_BYTES}
    piece = (await ask(source, asked, LIMITS, Piece)).value
    return piece.content.decode("utf-8", "replace") if piece is not None else ""


async def _rules(
    source: Lease, baseline: Baseline, rows: Sequence[Row], differing: Collection[str]
) -> dict[str, str]:
    """Return the rules of the workspace as it is now: directory → text. Raises NotRead."""
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
    """Return those of the rows that no rule leaves out. Raises NotRead."""
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
    """Pass the content of new and changed files to `write`, piece by piece; an empty file has one
    empty piece.

    Raises:
        NotRead: one is not as it was found.
        EngineError: the guest failed.
    """
    files = {
        one.path: one.after for one in wanted if one.after is not None and not one.after.is_link
    }
    for path in files.keys() & found.texts.keys():  # what was hashed
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
    """Return the entries of rows, and the content of what can be shown."""
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
    """Whether a file or link is as it was copied in; None if only its content can tell."""
    path, size, can_run, version = row
    before = baseline.tree.get(path)
    if before is None or (size, can_run) != (before.size, before.can_run):
        return False
    if size == LINK:
        return version == before.digest
    known = baseline.versions.get(path)
    return known[1] == before.digest if version and known and known[0] == version else None


async def _differing(source: Lease, baseline: Baseline, rows: Sequence[Row]) -> list[Row]:
    """Return the files and links that are not, or may not be, as they were copied in."""
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
