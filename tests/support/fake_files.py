"""A model of the guest's program `files` on a directory of this host, for tests without Docker.

It implements only the program's contract, including each refusal: a test
that needs a lying guest gives its answers by hand. Surveys are the program's own, on that directory.
"""

from __future__ import annotations

import base64
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.guest.container import files, survey, walk
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


UPLOAD = ".fumehood-upload-"
"""Prefix of an unfinished upload, which no list shows."""


class Refused(Exception):
    """A refusal that is a regular answer."""


class FakeFiles:
    """A lease whose program `files` works below `root`. `room` is the size limit of one upload."""

    queue_ms = 0.0

    def __init__(self, root: Path, room: int = 1 << 20) -> None:
        self.root = root
        self.room = room
        self.requests: list[JsonObject] = []

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        assert program == "files"
        self.requests.append(arguments)
        return RunEnding(EndedBy.OK, "session", exit_code=0, result=self.answer(arguments))

    def answer(self, request: JsonObject) -> JsonObject:
        try:
            self._hold_to(request)
            return dict(getattr(self, f"_{request['do']}")(request))
        except Refused as refusal:
            return {"fault": {"kind": str(refusal), "message": "no"}}

    def _survey(self, request: JsonObject) -> JsonObject:
        return self._looked(request["of"]).told(int(request["most"]))

    def _hold_to(self, request: JsonObject) -> None:
        if "expected" in request and self._looked(request).base() != request["expected"]:
            raise Refused("not_as_seen")

    def _looked(self, request: JsonObject) -> survey.Survey:
        kept, walk.WORKSPACE = walk.WORKSPACE, str(self.root)
        try:
            return survey.Survey(request)
        except walk.Refused as refusal:
            raise Refused(refusal.kind) from None
        finally:
            walk.WORKSPACE = kept

    def _list(self, request: JsonObject) -> JsonObject:
        start = self._at(request["path"]) if request["path"] else self.root
        found = sorted(self._below(start, recursive=request["recursive"]))
        most = request["most"]
        found = [path for path in found if path > request.get("after", "")]
        return {
            "entries": [self._entry(path) for path in found[:most]],
            "has_more": len(found) > most,
        }

    def _below(self, start: Path, *, recursive: bool) -> Iterator[str]:
        if not start.is_dir():
            yield str(start.relative_to(self.root))
            return
        for entry in os.scandir(start):
            if entry.name.startswith(UPLOAD):
                continue
            path = Path(entry.path)
            yield str(path.relative_to(self.root))
            if recursive and entry.is_dir(follow_symlinks=False):
                yield from self._below(path, recursive=True)

    def _entry(self, path: str) -> JsonObject:
        found = (self.root / path).lstat()
        return {
            "path": path,
            "kind": KINDS.get(stat.S_IFMT(found.st_mode), "other"),
            "size": found.st_size if stat.S_ISREG(found.st_mode) else 0,
            "modified_ns": found.st_mtime_ns,
        }

    def _read(self, request: JsonObject) -> JsonObject:
        path = self._at(request["path"])
        self._must_be_plain(path)
        with path.open("rb") as file:
            file.seek(request["offset"])
            piece = file.read(request["length"])
            found = os.fstat(file.fileno())
        return {
            "content_base64": base64.b64encode(piece).decode(),
            "size": found.st_size,
            "version": f"{found.st_mtime_ns}-{found.st_ino}-{found.st_size}",
        }

    def _write(self, request: JsonObject) -> JsonObject:
        path = self._at(request["path"], may_be_missing=True)
        self._may_stand(path, request["mode"])
        before = path.read_bytes() if request["mode"] == "append" and path.exists() else b""
        return self._put_down(path, before + base64.b64decode(request["content_base64"]))

    def _put(self, request: JsonObject) -> JsonObject:
        upload = self._upload(request)
        content = base64.b64decode(request["content_base64"])
        size = upload.stat().st_size if upload.exists() else 0
        if size != request["offset"]:
            raise Refused("changed")
        if size + len(content) > self.room:
            raise Refused("no_room")
        with upload.open("ab") as file:
            file.write(content)
        return {"size": size + len(content)}

    def _finish(self, request: JsonObject) -> JsonObject:
        upload = self._upload(request)
        if not upload.exists() or upload.stat().st_size != request["size"]:
            raise Refused("changed")
        try:
            path = self._at(request["path"], may_be_missing=True)
            self._may_stand(path, request["mode"])
            path.parent.mkdir(parents=True, exist_ok=True)
            upload.rename(path)
        finally:
            upload.unlink(missing_ok=True)
        return {"size": request["size"]}

    def _unpack(self, request: JsonObject) -> JsonObject:
        return self._by_the_guest(request)

    def _read_many(self, request: JsonObject) -> JsonObject:
        return self._by_the_guest(request)

    def _by_the_guest(self, request: JsonObject) -> JsonObject:
        kept, walk.WORKSPACE = walk.WORKSPACE, str(self.root)
        try:
            result: JsonObject = files.run(request)[1]["result"]
        finally:
            walk.WORKSPACE = kept
        return result

    def _drop(self, request: JsonObject) -> JsonObject:
        self._upload(request).unlink(missing_ok=True)
        return {}

    def _upload(self, request: JsonObject) -> Path:
        assert len(request["token"]) == 32
        return self.root / f"{UPLOAD}{request['token']}"

    def _delete(self, request: JsonObject) -> JsonObject:
        said: dict[str, list[Any]] = {"deleted": [], "missing": [], "failed": []}
        for name in request["paths"]:
            try:
                path = self._at(name, last_may_be_link=True)
                if path.is_dir() and not path.is_symlink():
                    if any(path.iterdir()) and not request["recursive"]:
                        raise Refused("not_empty")
                    shutil.rmtree(path)
                else:
                    path.unlink()
                said["deleted"].append(name)
            except Refused as refusal:
                if str(refusal) == "not_found":
                    said["missing"].append(name)
                else:
                    said["failed"].append({"path": name, "why": str(refusal)})
        return said

    def _at(
        self, name: str, *, may_be_missing: bool = False, last_may_be_link: bool = False
    ) -> Path:
        path = self.root
        parts = name.split("/")
        for index, part in enumerate(parts):
            if part in ("", ".", ".."):
                raise Refused("invalid")
            path = path / part
            is_last = index == len(parts) - 1
            if path.is_symlink() and not (is_last and last_may_be_link):
                raise Refused("link")
        if not os.path.lexists(path) and not may_be_missing:
            raise Refused("not_found")
        return path

    def _must_be_plain(self, path: Path) -> None:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Refused("not_a_file")

    def _may_stand(self, path: Path, mode: str) -> None:
        if os.path.lexists(path):
            if mode == "create":
                raise Refused("exists")
            self._must_be_plain(path)

    def _put_down(self, path: Path, content: bytes) -> JsonObject:
        if len(content) > self.room:
            raise Refused("no_room")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"size": len(content)}
