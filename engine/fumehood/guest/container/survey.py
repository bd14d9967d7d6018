"""A survey of a write or a deletion: the current state of everything that the operation affects.

Guest side, in the child that carries out file operations; used by `files`. A survey changes
nothing. It is made twice: first for the person who approves the operation, and again when the
approved request is carried out. The hash of the second survey must equal the hash that was
approved. Invariants: a survey is complete or refused; an approved request does not change what its
survey could not see.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fumehood.guest.container.walk import (
    DIRECTORY_FLAGS,
    MAX_ANSWER_BYTES,
    MAX_PATH_BYTES,
    Refused,
    directory_at,
    enter,
    open_plain,
    status_of,
)
from fumehood.guest.core.pipes import held
from fumehood.protocol.framing import MAX_DIRECTORY_DEPTH

FORMAT = b"fumehood.survey.1\n"
"""Version of the encoding that is hashed. If it changes, every hash changes, so earlier approvals
become invalid.
"""

MAX_HASHED_BYTES = 1 << 30
"""Maximum total size in bytes of the hashed files. It is twice the largest workspace. Sparse files
can exceed it; files beyond it are identified by their version instead of a hash.
"""

CHUNK_BYTES = 1 << 20

Entry = dict[str, Any]

KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
_OTHERS = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclass(frozen=True)
class Outcome:
    """Whether a write or deletion of one path is refused. `fault` is the kind of refusal, or None
    if the path is not refused.
    """

    path: str
    fault: str | None = None
    message: str = ""


class Survey:
    """The current state of everything in the workspace that a write or deletion would affect.
    `request` describes the write or deletion.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._entries: dict[str, Entry] = {}
        self._left_to_hash = MAX_HASHED_BYTES
        self._appended: Entry | None = None
        self.outcomes: list[Outcome] = []
        if request["do"] == "write":
            self._look_before_writing(request)
        else:
            self._look_before_deleting(request["paths"], bool(request["recursive"]))

    def base(self) -> str:
        """The survey's hash: the SHA-256 over all entries and the outcome of each path."""
        total = hashlib.sha256(FORMAT)
        for entry in self._sorted():
            total.update(_line(entry))
        for outcome in self.outcomes:
            total.update(_line({"path": outcome.path, "fault": outcome.fault}))
        return total.hexdigest()

    def told(self, most: int) -> dict[str, Any]:
        """Return the answer to the host. It contains the survey's hash and entries: at most `most`
        entries, and only as many as fit into one answer. `count` and `size` are the number and
        total size of existing entries at or below those requested paths that are not refused.
        """
        shown: list[Entry] = []
        room = MAX_ANSWER_BYTES
        for entry in self._sorted():
            room -= len(_line(entry))
            if len(shown) >= most or room < 0:
                break
            shown.append(entry)
        tops = {outcome.path for outcome in self.outcomes if outcome.fault is None}
        going = [
            entry
            for path, entry in self._entries.items()
            if entry["kind"] != "absent" and _is_within(path, tops)
        ]
        return {
            "base": self.base(),
            "entries": shown,
            "has_more": len(shown) < len(self._entries),
            "faults": [outcome.fault for outcome in self.outcomes],
            "appended": self._appended,
            "count": len(going),
            "size": sum(entry.get("size", 0) for entry in going),
        }

    def _sorted(self) -> list[Entry]:
        return [self._entries[path] for path in sorted(self._entries, key=os.fsencode)]

    # -- a write ------------------------------------------------------------------------

    def _look_before_writing(self, request: dict[str, Any]) -> None:
        path = request["path"]
        try:
            self._look_at_target(path, request)
        except Refused as refusal:
            self.outcomes.append(Outcome(path, refusal.kind, str(refusal)))
        else:
            self.outcomes.append(Outcome(path))

    def _look_at_target(self, path: str, request: dict[str, Any]) -> None:
        with self._parent(path, may_lack=True) as (directory, name):
            try:
                status = status_of(name, directory, path)
            except Refused as refusal:
                if refusal.kind != "not_found":
                    raise
                self._entries.setdefault(path, _shown(path, "absent"))
                _require_change(directory)
                return
            digest = self._note(path, name, directory, status)
            if request["mode"] == "create":
                raise Refused("exists", f"There is already a {path}.")
            if not stat.S_ISREG(status.st_mode):
                kind = "link" if stat.S_ISLNK(status.st_mode) else "not_a_file"
                raise Refused(kind, f"{path} is there and is not a plain file.")
            if request["mode"] != "append":
                _require_change(directory)
                return
            if not os.access(name, os.W_OK, dir_fd=directory):
                raise Refused("no_right", f"{path} cannot be written.")
            if digest is None:
                raise Refused("unseen", f"{path} cannot be read.")
            content = base64.b64decode(request["content_base64"])
            digest.update(content)
            size = status.st_size + len(content)
            self._appended = {"size": size, "sha256": digest.hexdigest()}

    # -- a deletion ---------------------------------------------------------------------

    def _look_before_deleting(self, paths: list[str], recursive: bool) -> None:
        """Survey `paths` as if they were deleted in this order. If an earlier deletion would remove
        a later path, the later path counts as missing. `recursive` says whether directories are
        deleted together with their content.
        """
        gone: set[str] = set()
        for path in paths:
            try:
                if _is_within(path, gone):
                    raise Refused("not_found", f"{path} goes with another one before it.")
                self._look_at_one(path, recursive, gone)
            except Refused as refusal:
                self.outcomes.append(Outcome(path, refusal.kind, str(refusal)))
            else:
                self.outcomes.append(Outcome(path))
                gone.add(path)

    def _look_at_one(self, path: str, recursive: bool, gone: set[str]) -> None:
        with self._parent(path) as (directory, name):
            try:
                status = status_of(name, directory, path)
            except Refused:
                self._entries.setdefault(path, _shown(path, "absent"))
                raise
            self._note(path, name, directory, status)
            _require_change(directory)
            if not stat.S_ISDIR(status.st_mode):
                return
            if recursive:
                self._look_below(path, name, directory, MAX_DIRECTORY_DEPTH)
                return
            with _opened(name, directory, path) as inner:
                if any(f"{path}/{below}" not in gone for below in os.listdir(inner)):
                    raise Refused("not_empty", "The directory is not empty.")

    def _look_below(self, path: str, name: str, directory: int, depth: int) -> None:
        if not depth:
            raise Refused("unseen", f"{path} is nested too deeply.")
        with _opened(name, directory, path) as inner:
            for below in os.listdir(inner):
                path_below = f"{path}/{below}"
                status = os.stat(below, dir_fd=inner, follow_symlinks=False)
                self._note(path_below, below, inner, status)
                if stat.S_ISDIR(status.st_mode):
                    self._look_below(path_below, below, inner, depth - 1)

    # -- what is there ------------------------------------------------------------------

    @contextmanager
    def _parent(self, path: str, *, may_lack: bool = False) -> Iterator[tuple[int, str]]:
        """Record each directory above `path` in this survey. Yield a descriptor of the directory
        that contains `path`, and the last name in `path`.

        If `may_lack` is True and a directory is missing, yield a descriptor of the last existing
        directory and the missing directory's name instead.

        Raises:
            Refused: the path cannot be followed, or a directory is missing and `may_lack` is False.
        """
        *above, last = path.split("/")
        if any(name in ("", ".", "..") for name in (*above, last)):
            raise Refused("invalid", "The path is not made of plain names.")
        with directory_at("") as top:
            directory = os.dup(top)
            try:
                so_far = ""
                for name in above:
                    so_far = f"{so_far}/{name}" if so_far else name
                    try:
                        status = status_of(name, directory, path)
                    except Refused as refusal:
                        self._entries.setdefault(so_far, _shown(so_far, "absent"))
                        if not may_lack or refusal.kind != "not_found":
                            raise
                        last = name
                        break
                    self._note(so_far, name, directory, status)
                    inner = enter(name, directory, path)
                    os.close(directory)
                    directory = inner
                yield directory, last
            finally:
                os.close(directory)

    def _note(self, path: str, name: str, directory: int, status: os.stat_result) -> Any:
        """Record the entry `name` of the open directory `directory`, unless it is already recorded.
        `path` is the entry's whole path, and `status` its status.

        Return the hash object of a file's content. Return None if the entry is not a file, was
        already recorded, is too large, or cannot be read. Raises Refused if the path is too long.
        """
        if path in self._entries:
            return None
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise Refused("unseen", "A path is too long to be shown.")
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "other")
        entry = self._entries[path] = _shown(path, kind)
        entry["mode"] = stat.S_IMODE(status.st_mode)
        digest = None
        if kind == "file":
            entry.update(size=status.st_size, links=status.st_nlink)
            digest = self._digest(name, directory, path, status)
            if digest is not None:
                entry["sha256"] = digest.hexdigest()
            else:
                # No program can set the change time, but in memory it can miss a write.
                entry["version"] = f"{status.st_ino}:{status.st_mtime_ns}:{status.st_ctime_ns}"
        elif kind == "link":
            entry.update(_text(os.readlink(name, dir_fd=directory), "target"))
        elif kind == "other":
            entry["special"] = _OTHERS.get(stat.S_IFMT(status.st_mode), "unknown")
        return digest

    def _digest(self, name: str, directory: int, path: str, status: os.stat_result) -> Any:
        """Return the SHA-256 hash object of a file's content, or None if the file is unreadable or
        too large.
        """
        if status.st_size > self._left_to_hash:
            return None
        self._left_to_hash -= status.st_size
        try:
            descriptor = open_plain(name, directory, path)
        except OSError:
            return None
        digest = hashlib.sha256()
        with held(descriptor):
            while chunk := os.read(descriptor, CHUNK_BYTES):
                digest.update(chunk)
        return digest


def hold_to(request: dict[str, Any]) -> dict[str, Outcome]:
    """Survey the workspace again for an approved request. Return the outcomes of all refused paths,
    by path.

    Raises:
        Refused: the survey's hash is not the approved hash, `request["expected"]`, because the
            workspace has changed.
    """
    survey = Survey(request)
    if survey.base() != request["expected"]:
        raise Refused("not_as_seen", "The workspace is not any more as it was looked at.")
    return {one.path: one for one in survey.outcomes if one.fault is not None}


def _require_change(directory: int) -> None:
    """Check that entries of an open directory can be created and removed. Raises Refused if they
    cannot.
    """
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory):
        raise Refused("no_right", "The directory cannot be written.")


@contextmanager
def _opened(name: str, directory: int, path: str) -> Iterator[int]:
    try:
        inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    except OSError:
        raise Refused("unseen", f"{path} cannot be read.") from None
    with held(inner):
        if not os.access(".", os.X_OK, dir_fd=inner):
            raise Refused("unseen", f"{path} cannot be looked into.")
        yield inner


def _is_within(path: str, tops: set[str]) -> bool:
    """Whether a path is one of the paths `tops`, or below one of them."""
    while path:
        if path in tops:
            return True
        path = path.rpartition("/")[0]
    return False


def _shown(path: str, kind: str) -> Entry:
    return {**_text(path, "path"), "kind": kind}


def _text(name: str, field: str) -> Entry:
    """Return an entry whose field `field` is `name` as text. If `name` is not UTF-8, its invalid
    bytes are escaped, and the entry also has a field with all its bytes in base64.
    """
    raw = os.fsencode(name)
    try:
        return {field: raw.decode("utf-8")}
    except UnicodeDecodeError:
        encoded = base64.b64encode(raw).decode("ascii")
        return {field: raw.decode("utf-8", "backslashreplace"), f"{field}_base64": encoded}


def _line(value: Entry) -> bytes:
    """Return `value` as one line of JSON in a fixed format. The host encodes the value in the same
    way.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii") + b"\n"
