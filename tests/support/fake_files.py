"""The guest's own program `files` on a directory of this host, for tests without Docker.

A test that needs a lying guest gives its answers by hand.
"""

from __future__ import annotations

import base64
from pathlib import Path

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.guest.container import files, walk
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

UPLOAD = files.UPLOAD_PREFIX


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
        content = base64.b64decode(request.get("content_base64", ""))
        if request.get("offset", 0) + len(content) > self.room and content:
            return {"fault": {"kind": "no_room", "message": "The workspace is full."}}
        kept, walk.WORKSPACE = walk.WORKSPACE, str(self.root)
        try:
            result: JsonObject = files.run(request)[1]["result"]
        finally:
            walk.WORKSPACE = kept
        return result
