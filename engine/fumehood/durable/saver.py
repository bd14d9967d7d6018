"""The saver of durable sessions: copies their workspaces to the engine's file store, and back.

Host side, called by the sessions; uses the guest's program `files` and `storage/files`. The guest's
answers are untrusted, but can only harm its own session: names of stored files contain digests that
the engine computes, and numbers and sizes are limited. The content of a file is stored in pieces,
and a manifest lists the pieces of each file. Invariants: a manifest is stored after all pieces that
it names; a piece is deleted only once a manifest without it is stored; saving an unchanged
workspace takes only one scan.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import anyio

from fumehood.core.arguments import MAX_FILES as MAX_PATHS
from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.errors import EngineError, StateUnavailable
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.session import SavedCopy
from fumehood.executors.effects import diff_of, shown_changes
from fumehood.executors.workspace_guest import (
    MAX_FILES,
    MAX_LISTED,
    PIECE_BYTES,
    SHOWN_CHARACTERS,
    Deletion,
    NotRead,
    Row,
    Written,
    answer_of,
    contents,
    scan,
)
from fumehood.sandbox.session import CopyLost, CopySource, NotSaved
from fumehood.sandbox.wall import try_later
from fumehood.storage.files import Missing, SavedFiles

BATCH_BYTES = 16 << 20
"""Total size of the pieces that one save or restoration has in memory at a time, in bytes."""

BATCH_PIECES = 256
"""Maximum number of pieces that are stored or fetched together."""

FILL_BYTES = 2 << 20
"""Maximum size of the file contents in one request to the guest, in bytes before base64."""

SETTLED_S = 0.05
"""Seconds after a write until the guest reports a version for the file."""

SAVE_S = 60.0
"""Maximum seconds to save a workspace after a call."""

RESTORED_BYTES_PER_S = 5 << 20
"""Minimum speed of a restoration, in bytes per second. Its deadline is `SAVE_S` plus the time that
the files take at this speed."""

CHANGES = frozenset({"write", "finish", "unpack", "delete"})
"""Requests to the guest's program `files` that may change files."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A saved file or directory. A directory has the size -1.

    `pieces` are the names of the stored pieces of a file's content, in order.
    """

    size: int
    can_run: bool
    pieces: tuple[str, ...]
    version: str = field(default="", compare=False)
    """The file's version in the workspace when it was read, or "" if unknown. While its version is
    the same, the file is unchanged."""


Tree = dict[str, SavedFile]
"""Path in the workspace → file or directory."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that a trial made to a workspace."""

    files: Mapping[str, tuple[SavedFile | None, SavedFile | None]]
    """Changed path → the file before and after the trial, or None if there was no file."""
    new: frozenset[str]
    """Names of the pieces that were stored only for these changes."""
    others: tuple[str, ...]
    """Paths of links and special files that the trial created."""

    @property
    def names(self) -> set[str]:
        """The names of all stored pieces that are needed to apply these changes. The pieces contain
        the changed files in their state after the trial.
        """
        kept = (file for _, file in self.files.values() if file is not None)
        return {*self.new, *(name for file in kept for name in file.pieces)}


@dataclass(slots=True)
class _Known:
    """The last copy of a session's files, cached in memory."""

    copy: SavedCopy
    tree: Tree
    others: tuple[str, ...] | None = None
    """Paths of links and special files in the workspace, which copies do not include. None if the
    workspace may differ from the copy."""
    garbage: set[str] | None = None
    """Names of the session's stored files that the copy does not need, or None if they have not
    been listed yet."""


class SessionSaver:
    """Saves and restores the workspaces of durable sessions. It can also undo the changes of a
    trial, and apply them later.
    """

    def __init__(self, files: SavedFiles) -> None:
        self._files = files
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._held: set[str] = set()
        """Names of stored pieces that the changes of undecided trials need, so that `save` keeps
        them."""

    def may_change(self, program: str, arguments: JsonObject) -> bool:
        return program != "files" or arguments.get("do") in CHANGES

    async def save(
        self,
        source: CopySource,
        copy: SavedCopy,
        now: Callable[[], datetime],
        store: Callable[[SavedCopy], Awaitable[None]],
    ) -> None:
        attempt = _Attempt(self._files, source)
        known: _Known | None = None
        try:
            with anyio.fail_after(SAVE_S):
                known = await self._know(source.session_id, copy)
                copied_at = now().isoformat()
                tree = await attempt.copy(known.tree)
                if tree == known.tree:
                    known.tree = tree  # equal files, but with their current versions
                    known.others = tuple(attempt.others)
                    return
                if known.garbage is None:
                    known.garbage = await self._files.names(source.session_id) - attempt.new
                name, content = await attempt.put_manifest(tree)
        except (Exception, asyncio.CancelledError) as error:
            await attempt.undo()
            if known is not None:
                known.others = None
            if known is not None and known.garbage is not None:
                known.garbage |= attempt.new  # `undo` may have failed to delete some of them
            if isinstance(error, asyncio.CancelledError):
                raise
            raise NotSaved(_why(error)) from error
        known.garbage |= attempt.new | {copy.manifest} | _names(known.tree)
        saved = SavedCopy(copied_at, name, len(content))
        await store(saved)
        known.copy, known.tree, known.others = saved, tree, tuple(attempt.others)
        known.garbage -= {name} | _names(tree)
        with suppress(OSError):  # after a failure, the next save tries again
            await self._files.delete({name for name in known.garbage - self._held if name})
            known.garbage &= self._held

    async def restore(self, target: CopySource, copy: SavedCopy) -> None:
        self._known.pop(target.session_id, None)
        try:
            known = await self._know(target.session_id, copy)
            size = sum(file.size for file in known.tree.values())
            with anyio.fail_after(SAVE_S + size / RESTORED_BYTES_PER_S):
                await self._fill(target, known.tree)
                await anyio.sleep(SETTLED_S)
                # No program has run yet, so these are the restored files.
                rows = {row[0]: row[3] for row in (await scan(target))[0]}
                known.tree = {
                    path: replace(file, version=rows.get(path, ""))
                    for path, file in known.tree.items()
                }
        except Missing:
            if not await self._has_any(target.session_id):
                raise StateUnavailable(
                    "The engine's file store has no files of this session. It may not be mounted.",
                ) from None
            raise CopyLost("its list of files is missing or damaged") from None
        except StateUnavailable:
            raise
        except (TimeoutError, EngineError, OSError, NotSaved) as error:
            raise try_later(f"The session's files could not be restored: {_why(error)}.") from error

    # -- trials ----------------------------------------------------------------------------

    def others(self, session_id: str, copy: SavedCopy) -> tuple[str, ...] | None:
        """Return the paths of links and special files in the workspace, which saved copies do not
        include.

        Return None if the workspace may differ from `copy`, the session's last saved copy. The
        paths are then unknown.
        """
        known = self._known.get(session_id)
        return known.others if known is not None and known.copy == copy else None

    async def hold(self, source: CopySource, copy: SavedCopy) -> tuple[Changes, JsonObject]:
        """Store the files that a trial has changed. Their contents are kept until `let_go` is
        called.

        `source` is the session's workspace, and `copy` is the copy that was saved before the trial.
        Return the changes, and their description in the same form as the preview of a call.

        Raises:
            NotSaved: the files could not be read or stored.
        """
        known = await self._know(source.session_id, copy)
        attempt = _Attempt(self._files, source)
        try:
            with anyio.fail_after(SAVE_S):
                tree = await attempt.copy(known.tree)
                changes = Changes(
                    {
                        path: (known.tree.get(path), tree.get(path))
                        for path in sorted({*known.tree, *tree})
                        if known.tree.get(path) != tree.get(path)
                    },
                    frozenset(attempt.new),
                    tuple(attempt.others),
                )
                shown = await self._shown(changes)
        except BaseException as error:
            await attempt.undo()
            if isinstance(error, TimeoutError | EngineError | OSError | Missing | NotRead):
                raise NotSaved(_why(error)) from error
            raise
        self._held |= changes.names
        return changes, shown

    async def put_back(self, source: CopySource, copy: SavedCopy, changes: Changes) -> None:
        """Undo the changes of a trial, so that the workspace is equal to `copy` again. `copy` was
        saved before the trial.

        Raises:
            NotSaved: the workspace still differs from the copy.
        """
        if not changes.files and not changes.others:
            return
        known = await self._know(source.session_id, copy)
        await self._put(source, {path: pair[::-1] for path, pair in changes.files.items()})
        rows, others = await self._scanned(source, changes.others)
        if others or {row[0]: (row[1], row[2]) for row in rows} != {
            path: (file.size, file.can_run) for path, file in known.tree.items()
        }:
            raise NotSaved("the workspace still differs from the last copy")
        versions = {row[0]: row[3] for row in rows}
        for path in changes.files.keys() & known.tree.keys():
            known.tree[path] = replace(known.tree[path], version=versions[path])

    def touched(self, session_id: str, changes: Changes) -> list[str]:
        """Return the paths that applying `changes` would overwrite or delete, although the session
        has changed them since the trial.

        A path counts as changed if the session's last copy differs from the state before the trial.
        """
        known = self._known.get(session_id)
        tree = known.tree if known is not None else {}
        going = tuple(
            f"{path}/"
            for path, (before, after) in changes.files.items()
            if before is not None and before.size < 0 and (after is None or after.size >= 0)
        )
        return [
            path
            for path, (before, _) in changes.files.items()
            if _content(tree.get(path)) != _content(before)
        ] + [path for path in tree if path.startswith(going) and path not in changes.files]

    async def put_in(self, source: CopySource, changes: Changes) -> None:
        """Apply the changes to the workspace.

        Raises:
            NotSaved: the changes could not be applied completely.
        """
        await self._put(source, changes.files)

    async def let_go(self, changes: Changes) -> None:
        """Delete the contents that were stored only for `changes`, which are no longer needed."""
        self._held -= changes.names
        with suppress(OSError, EngineError):
            await self._files.delete(set(changes.new))

    async def _put(
        self, target: CopySource, wanted: Mapping[str, tuple[SavedFile | None, SavedFile | None]]
    ) -> None:
        """Replace files in the workspace `target`. `wanted` maps each path to a pair: the file that
        is there now, and the file that must be there. None means that there is no file.

        Raises NotSaved if not all files could be replaced.
        """
        going = [path for path, (present, _) in wanted.items() if present is not None]
        tree = {path: file for path, (_, file) in wanted.items() if file is not None}
        try:
            with anyio.fail_after(SAVE_S):
                await _delete(target, going)
                await self._fill(target, tree)
        except (TimeoutError, EngineError, OSError, CopyLost) as error:
            raise NotSaved(str(error) if isinstance(error, CopyLost) else _why(error)) from error

    async def _scanned(
        self, source: CopySource, going: Sequence[str]
    ) -> tuple[list[Row], list[str]]:
        """Delete the paths in `going`, then scan the workspace. Return two lists. The first list
        has a row for each file and directory: path, size, whether it is executable, version. The
        second list has the paths of links and special files.

        Raises NotSaved if the workspace cannot be changed or read.
        """
        try:
            await _delete(source, list(going))
            return await scan(source)
        except (EngineError, OSError, NotRead) as error:
            raise NotSaved(_why(error)) from error

    async def _shown(self, changes: Changes) -> JsonObject:
        """Return a description of the changes that people see, in the same form as the preview of a
        call.
        """
        added: list[JsonObject] = []
        changed: list[JsonObject] = []
        removed: list[JsonObject] = []
        room = MAX_READ_BYTES
        for path, (before, after) in list(changes.files.items())[:MAX_LISTED]:
            if after is None:
                assert before is not None
                removed.append({"path": path, **_facts(before)})
                continue
            sizes = [max(0, file.size) for file in (before, after) if file is not None]
            diff: JsonObject = {}
            if after.size >= 0 and sum(sizes) <= room:
                room -= sum(sizes)
                texts = [await self._text(file) for file in (before, after)]
                diff = await diff_of(*texts)
            elif after.size >= 0:
                diff = {"too_large": True}
            if before is None:
                added.append({"path": path, **_facts(after), **diff})
            else:
                old, new = _facts(before), _facts(after)
                if old["kind"] == new["kind"]:
                    del old["kind"], new["kind"]
                entry = {"path": path, "before": old, "after": new}
                changed.append({**entry, **diff})
        gone = [before for before, after in changes.files.values() if before and not after]
        shown = shown_changes(
            added=added, changed=changed, removed=removed, count=len(gone),
            size=sum(max(0, file.size) for file in gone),
            truncated=len(changes.files) > MAX_LISTED,
        )  # fmt: skip
        is_new = [before is None for before, after in changes.files.values() if after is not None]
        shown["counts"] |= {"added": sum(is_new), "changed": len(is_new) - sum(is_new)}
        return shown

    async def _text(self, file: SavedFile | None) -> bytes:
        if file is None or file.size <= 0:
            return b""
        names = {name: _piece_size(file, number) for number, name in enumerate(file.pieces)}
        contents = await self._files.get(names)
        return b"".join(contents[name] for name in file.pieces)

    async def drop(self, session_id: str) -> None:
        self._known.pop(session_id, None)
        try:
            await self._files.delete(await self._files.names(session_id))
        except (OSError, EngineError):
            self._files.overdue.set()

    async def _has_any(self, session_id: str) -> bool:
        try:
            return bool(await self._files.names(session_id))
        except OSError:
            return False

    async def _know(self, session_id: str, copy: SavedCopy) -> _Known:
        """Return a session's last copy from the cache. If the cache does not contain `copy`, first
        read the copy's manifest from the file store.

        Raises Missing if the manifest is missing or damaged, and OSError if the store cannot be
        used.
        """
        known = self._known.pop(session_id, None)
        if known is None or known.copy != copy:
            tree: Tree = {}
            if copy.manifest:
                got = await self._files.get({copy.manifest: copy.manifest_bytes})
                tree = {
                    path: SavedFile(size, can_run, tuple(pieces), version)
                    for path, size, can_run, version, *pieces in json.loads(got[copy.manifest])
                }
            known = _Known(copy, tree)
        self._known[session_id] = known
        while sum(len(cached.tree) for cached in self._known.values()) > 10 * MAX_FILES:
            self._known.popitem(last=False)  # the least recently used one
        return known

    async def _fill(self, target: CopySource, tree: Tree) -> None:
        """Write the files and directories of a tree into a workspace. The caller must ensure that
        the workspace contains none of them.

        Raises CopyLost if a stored piece of a file is missing or damaged.
        """
        directories = [path for path, file in tree.items() if file.size < 0]
        for at in range(0, len(directories), MAX_LISTED):
            await answer_of(target, _filling(directories[at : at + MAX_LISTED], []), Written)
        batch: list[tuple[str, SavedFile, int]] = []
        room = BATCH_BYTES
        for path, file in tree.items():
            for number in range(max(len(file.pieces), file.size == 0)):
                batch.append((path, file, number))
                room -= _piece_size(file, number)
                if room <= 0 or len(batch) >= BATCH_PIECES:
                    await self._fill_batch(target, batch)
                    batch, room = [], BATCH_BYTES
        await self._fill_batch(target, batch)

    async def _fill_batch(
        self, target: CopySource, batch: list[tuple[str, SavedFile, int]]
    ) -> None:
        names = {
            file.pieces[number]: _piece_size(file, number) for _, file, number in batch if file.size
        }
        try:
            contents = await self._files.get(names)
        except Missing as error:
            lost = next(path for path, file, n in batch if str(error) in file.pieces[n : n + 1])
            shown = visible(lost)[:SHOWN_CHARACTERS]
            raise CopyLost(f"a piece of the file {shown} is missing or damaged") from None
        parts: list[list[Any]] = []
        room = FILL_BYTES
        for path, file, number in batch:
            content = contents[file.pieces[number]] if file.size else b""
            for begin in range(0, max(1, len(content)), FILL_BYTES):
                part = content[begin : begin + FILL_BYTES]
                if parts and (room < len(part) or len(parts) >= MAX_LISTED):
                    await answer_of(target, _filling([], parts), Written)
                    parts, room = [], FILL_BYTES
                text = base64.b64encode(part).decode("ascii")
                parts.append([path, number * PIECE_BYTES + begin, file.can_run, text])
                room -= len(part)
        if parts:
            await answer_of(target, _filling([], parts), Written)


class _Attempt:
    """One attempt to save a workspace. The attempt records which pieces it has stored, so that
    `undo` can delete them.
    """

    def __init__(self, files: SavedFiles, source: CopySource) -> None:
        self.new: set[str] = set()
        """Names of the pieces that this attempt has stored, or may have stored."""
        self.others: list[str] = []
        """Paths of links and special files in the workspace, which are not saved."""
        self._files = files
        self._source = source
        self._prefix = f"{source.session_id}.{secrets.token_hex(4)}."

    async def copy(self, old: Tree) -> Tree:
        """Store the contents that the earlier copy `old` lacks, and return the workspace's tree.

        Raises:
            NotSaved: the sum of the file sizes exceeds the size of the workspace. This can happen
                if files have holes.
        """
        tree: Tree = {}
        changed: list[Row] = []
        rows, self.others = await scan(self._source)
        for row in rows:
            path, size, can_run, version = row
            before = old.get(path)
            if size < 0:
                tree[path] = SavedFile(-1, True, ())
            elif (
                before is not None
                and version
                and version == before.version
                and ((size, can_run) == (before.size, before.can_run))
            ):
                tree[path] = before
            else:
                changed.append(row)
        if sum(file.size for file in tree.values()) + sum(row[1] for row in changed) > (
            self._source.most_bytes
        ):
            raise NotSaved("the files are larger than the workspace, because they have holes")
        has = {name.rpartition(".")[2]: name for name in _names(old)}
        pieces: dict[str, list[str]] = {row[0]: [] for row in changed}
        waiting: dict[str, bytes] = {}
        async for path, content in contents(self._source, changed):
            digest = hashlib.sha256(content).hexdigest()
            if digest not in has:
                has[digest] = self._prefix + digest
                waiting[has[digest]] = content
            pieces[path].append(has[digest])
            if len(waiting) >= BATCH_PIECES or sum(map(len, waiting.values())) >= BATCH_BYTES:
                await self._put(waiting)
                waiting = {}
        await self._put(waiting)
        for path, size, can_run, version in changed:
            tree[path] = SavedFile(size, can_run, tuple(pieces[path]), version)
        return dict(sorted(tree.items()))

    async def put_manifest(self, tree: Tree) -> tuple[str, bytes]:
        """Store the manifest of a tree. Return the manifest's name and content."""
        rows = [[path, f.size, f.can_run, f.version, *f.pieces] for path, f in tree.items()]
        content = json.dumps(rows, separators=(",", ":")).encode()
        name = self._prefix + hashlib.sha256(content).hexdigest()
        await self._put({name: content})
        return name, content

    async def undo(self) -> None:
        """Delete the pieces that this attempt has stored. This is safe, because no stored manifest
        names these pieces.
        """
        with anyio.CancelScope(shield=True), suppress(OSError, EngineError):
            await self._files.delete(self.new)

    async def _put(self, contents: Mapping[str, bytes]) -> None:
        self.new.update(contents)
        await self._files.put(contents)


def _why(error: Exception) -> str:
    """Return the reason why an operation failed, as a clause for a message. If the type of `error`
    is unexpected, raise `error` again.
    """
    match error:
        case NotSaved() | NotRead():
            return str(error)
        case TimeoutError():
            return f"it took longer than {SAVE_S:g} s"
        case Missing():
            return "the engine's file store lacks files of the last copy"
        case EngineError():
            return f"{error.message[:1].lower()}{error.message[1:]}".rstrip(".")
        case OSError():
            reason = error.strerror or type(error).__name__
            return f"the engine's file store cannot be used ({reason})"
        case _:
            raise error


def _names(tree: Tree) -> set[str]:
    return {name for file in tree.values() for name in file.pieces}


def _piece_size(file: SavedFile, number: int) -> int:
    return min(PIECE_BYTES, file.size - number * PIECE_BYTES)


def _content(file: SavedFile | None) -> tuple[object, ...] | None:
    """Return a value for comparing two files. Identical files have equal values, even if their
    stored pieces have different names. For None (no file), return None.
    """
    if file is None:
        return None
    return file.size, file.can_run, *(name.rpartition(".")[2] for name in file.pieces)


def _facts(file: SavedFile) -> JsonObject:
    if file.size < 0:
        return {"kind": "directory", "mode": "0755"}
    return {"kind": "file", "mode": "0755" if file.can_run else "0644", "size": file.size}


async def _delete(target: CopySource, paths: list[str]) -> None:
    """Delete files, and directories with everything in them."""
    tops: list[str] = []
    for path in sorted(paths):  # a directory comes before its content
        if not tops or not path.startswith(f"{tops[-1]}/"):
            tops.append(path)
    for at in range(0, len(tops), MAX_PATHS):
        request = {"do": "delete", "paths": tops[at : at + MAX_PATHS], "recursive": True}
        await answer_of(target, request, Deletion)


def _filling(directories: list[str], parts: list[list[Any]]) -> JsonObject:
    return {"do": "fill", "directories": directories, "parts": parts}
