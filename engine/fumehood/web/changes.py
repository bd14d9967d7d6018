"""The changes in an effect preview as a page shows them: each file's part, and a tree of them.

Paths are untrusted and stay as they are: the template escapes them. Invariant: the joined names
from the root of the tree to a file are its path, and the tree is at most `MAX_DEPTH` deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fumehood.approvals.wording import entries_of, rest_of
from fumehood.core.json_types import JsonObject

KINDS = {"added": "+", "changed": "~", "removed": "−"}
"""Kind of change → its sign."""

MAX_SHOWN_OF_KIND = 200
"""Maximum number of files of one kind on a page. The rest is in the downloaded preview."""

MAX_OPEN = 20
"""Maximum number of files on a page whose diffs are unfolded."""

MAX_DEPTH = 8
"""Maximum number of nested directories in the tree. Deeper ones are part of a file's name."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of a preview."""

    number: int
    """Its place on the page, from 1."""
    kind: str
    path: str
    entry: JsonObject
    lines: tuple[int, int] | None
    """Lines that its diff adds and removes, or None if it has no diff."""

    @property
    def sign(self) -> str:
        """The sign of its kind."""
        return KINDS[self.kind]

    @property
    def has_body(self) -> bool:
        """Whether there is something to fold below its name."""
        entry = self.entry
        return self.lines is not None or "target" in entry or bool(rest_of(entry))

    @property
    def is_open(self) -> bool:
        """Whether its body is unfolded."""
        return self.number <= MAX_OPEN


@dataclass(frozen=True, slots=True)
class Branch:
    """A directory of the tree, or a file if it has a change."""

    name: str
    change: FileChange | None
    below: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """The files of a preview that a page shows."""

    files: tuple[FileChange, ...]
    left_out: tuple[tuple[str, int], ...]
    """Kinds with more files than are shown, and how many more."""

    @property
    def folded(self) -> int:
        """How many of the files are folded at first."""
        return sum(one.has_body and not one.is_open for one in self.files)

    @property
    def tree(self) -> tuple[Branch, ...]:
        """The files by directory. Directories with one entry are joined with it."""
        return _tree([(one.path.split("/", MAX_DEPTH), one) for one in self.files])


def changes_in(preview: JsonObject) -> Changes:
    """Return the files of a preview, in the order of their kinds."""
    files: list[FileChange] = []
    left_out: list[tuple[str, int]] = []
    for kind in KINDS:
        entries = entries_of(preview, kind)
        for entry in entries[:MAX_SHOWN_OF_KIND]:
            path, lines = str(entry["path"]), _lines(entry.get("diff"))
            files.append(FileChange(len(files) + 1, kind, path, entry, lines))
        if len(entries) > MAX_SHOWN_OF_KIND:
            left_out.append((kind, len(entries) - MAX_SHOWN_OF_KIND))
    return Changes(tuple(files), tuple(left_out))


def _lines(diff: object) -> tuple[int, int] | None:
    if not isinstance(diff, str):
        return None
    starts = [line[:1] for line in diff.split("\n")]
    return starts.count("+"), starts.count("-")


def _tree(rows: Sequence[tuple[Sequence[str], FileChange]]) -> tuple[Branch, ...]:
    """Return the branches of files, given the names that lead to each."""
    branches: list[Branch] = []
    directories: dict[str, list[tuple[Sequence[str], FileChange]]] = {}
    for (name, *rest), change in rows:
        if rest:
            directories.setdefault(name, []).append((rest, change))
        else:
            branches.append(Branch(name, change))
    for name, inner in directories.items():
        below = _tree(inner)
        if len(below) == 1:
            (only,) = below
            branches.append(Branch(f"{name}/{only.name}", only.change, only.below))
        else:
            branches.append(Branch(name, None, below))
    return tuple(sorted(branches, key=lambda one: one.name))
