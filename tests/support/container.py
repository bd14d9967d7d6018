"""A container wall that answers as scripted by the program, which is JSON.

`{"stdout": "x", "files": {"a.txt": "text", "big": 2000000}, "ended_by": "exit", …}` runs as
the wall's answer; with `"echo": true` it prints its request. Before that it
emits `"tells": [["stdout", "text"], ["progress", 50, "half"], …]`, each as often as a last
number says, and with `"waits": true` it waits to be cancelled. A session's files lie in the
directory `workspaces/SESSION` of its working directory, and its processes print their input. As a program (`python -m
support.container` with `tests` on the path) this is `fumehood serve` with such a wall.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from fumehood.core.errors import EndedBy, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit
from fumehood.sandbox.wall import RunEnding, RunSinks
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall, SeenRun
from support.fake_files import FakeFiles

_MEASURED = (
    "stdout", "stderr", "stdout_bytes", "stderr_bytes", "exit_code", "signal", "cpu_ms",
    "peak_memory_bytes", "limits_hit", "files_left_out",
)  # fmt: skip


def told(**answer: Any) -> str:
    """A program with this answer."""
    return json.dumps(answer)


def scripted_ending(run: SeenRun) -> RunEnding:
    """The ending a program requests."""
    if run.program == "files":
        return RunEnding(
            EndedBy.OK, "session", exit_code=0, result=workspace_of(run).answer(run.arguments)
        )
    script = _script(run)
    ended_by = EndedBy(script.get("ended_by", "ok"))
    measured = {key: script[key] for key in _MEASURED if key in script}
    if script.get("echo"):
        measured["stdout"] = json.dumps({name: run.arguments[name] for name in ("stdin", "files")})
    measured["limits_hit"] = tuple(measured.get("limits_hit", ()))
    result = None
    if ended_by is EndedBy.OK:
        measured.setdefault("exit_code", 0)
        said = script.get("value")
        result = script.get("result", {"value": said, "has_value": True, "value_repr": repr(said)})
    failure = script.get("failure") or {}
    return RunEnding(
        ended_by,
        "container_per_call" if run.fresh else "call",
        result=result,
        claimed_kind=failure.get("kind"),
        claimed_message=failure.get("message"),
        claimed_error=failure or None,
        **measured,
    )


async def scripted_meanwhile(run: SeenRun, sinks: RunSinks) -> None:
    """Emit a program's output and progress while it runs."""
    if "code" not in run.arguments:
        return
    script = json.loads(run.arguments["code"])
    for name, first, *rest in script.get("tells", []):
        if name == "progress":
            assert sinks.progress is not None
            for _ in range(rest[1] if len(rest) > 1 else 1):
                sinks.progress(first, rest[0])
        else:
            assert sinks.output is not None
            for _ in range(rest[0] if rest else 1):
                sinks.output(name, first)
                await asyncio.sleep(0)
    if script.get("waits"):
        try:
            await asyncio.Event().wait()
        finally:
            assert sinks.ending is not None
            sinks.ending(RunEnding(EndedBy.CANCELLED, "call", cpu_ms=7.0))


def scripted_files(run: SeenRun) -> list[tuple[str, bytes]]:
    """The program's files: a text, a number of `x` bytes, or the input file of that name (true)."""
    if run.program == "files":
        return []
    sent = {file["path"]: file for file in run.arguments["files"]}
    files = []
    for path, content in _script(run).get("files", {}).items():
        if content is True:
            files.append((path, sent[path]["content"].encode()))
        else:
            files.append((path, b"x" * content if isinstance(content, int) else content.encode()))
    return files


def workspace_of(run: SeenRun) -> FakeFiles:
    """The directory of a session's files, below `workspaces`."""
    root = Path("workspaces") / (run.domain.session_id or "none")
    root.mkdir(parents=True, exist_ok=True)
    return FakeFiles(root, room=1 << 30)


def _script(run: SeenRun) -> Any:
    source = "command" if run.program == "shell" else "code"
    return json.loads(run.arguments[source])


class _Processes:
    """The processes of a session: they run nothing, and print their command and their input."""

    def __init__(self) -> None:
        self._all: dict[str, dict[str, Any]] = {}
        self._printed: dict[str, str] = {}

    def answer(self, request: JsonObject) -> JsonObject:
        """Answer as a guest. Raises ResourceNotFound."""
        do, name = request["do"], request.get("name", "")
        if do == "list":
            return {"processes": [dict(one) for one in self._all.values()]}
        if do == "start":
            self._all[name] = {
                "name": name, "state": "running", "exit_code": None, "signal": None, "lost": False,
                "started_at": time.time(),
            }  # fmt: skip
            self._printed[name] = request["command"]
        if name not in self._all:
            raise ResourceNotFound("No process of this session is called that.")
        if do == "read":
            printed = self._printed[name]
            after = min(request["after"], len(printed))
            piece = {"text": printed[after:], "offset": len(printed), "skipped": 0}
            return {"output": {**piece, "ended": self._all[name]["state"] == "ended"}}
        if do == "write":
            self._printed[name] += base64.b64decode(request["data"]).decode()
        if do == "stop":
            self._all[name] |= {"state": "ended", "signal": 15}
        return {"process": dict(self._all[name])}


class _ScriptedWall(FakeWall):
    async def hold(self, *given: Any, **more: Any) -> FakePlace:
        place = await super().hold(*given, **more)
        place.on_processes = _Processes().answer
        return place


def scripted_wall() -> FakeWall:
    """The scripted container wall."""
    return _ScriptedWall(
        answer=scripted_ending,
        files=scripted_files,
        meanwhile=scripted_meanwhile,
        limits=CONTAINER_LIMITS,
        required=frozenset(Limit),
        enforced=frozenset(Limit),
    )


class _Nothing(list[SeenRun]):
    """A list of runs that discards them."""

    def append(self, run: SeenRun) -> None:
        """Discard the run."""


def main() -> None:
    """Run `fumehood serve` with this container wall."""
    from fumehood.cli.main import main as command
    from fumehood.http import server

    wall = scripted_wall()
    wall.runs = _Nothing()  # nobody here looks at them, and they hold what was sent
    server.Engine = partial(server.Engine, container=wall)  # type: ignore[misc,assignment]
    sys.argv = ["fumehood", "serve"]
    command()


if __name__ == "__main__":
    main()
