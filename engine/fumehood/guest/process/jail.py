"""The jail: prepares a child that imports and calls one function of a tool.

Guest side, between zygote and child. The child gives up its file access in two steps. Before it
reads its request, it restricts itself to the interpreter, the libraries and the import paths of all
tools. Once it knows the requested function, it keeps only the libraries and that function's import
path, and gives up the system calls for such restrictions. Only then is the tool's code imported.

The zygote preloads the public names of `fumehood` that a tool's module needs. It loads them by
name, because a guest module may import nothing of the engine but framing.

Landlock restricts the access. Older kernels restrict fewer kinds of access. The file rights that
this wall relies on are all in ABI 1 except truncation (ABI 3), which the system-call filter also
refuses.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from fumehood.guest.core import seccomp
from fumehood.guest.core.landlock import restrict_to
from fumehood.guest.core.pipes import tell
from fumehood.guest.process import filters
from fumehood.guest.process.zygote import run_child, run_probe
from fumehood.protocol.framing import MAX_REPORTS

OPEN_FILES = 64
PUBLIC_NAMES = ("ToolError", "ToolResult", "progress", "tool")
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment variables that keep linear algebra libraries from starting threads on import, which
would end the child.
"""


def preload(config: dict[str, Any]) -> Callable[[int], None]:
    """Load the modules that every tool's function needs. `config` has the paths of the libraries
    and tools.

    Return a function that each child must call first. Its argument is the supervisor's process id.
    It gives up the child's rights, and then answers requests.
    """
    fumehood = importlib.import_module("fumehood")
    for name in PUBLIC_NAMES:
        getattr(fumehood, name)
    inside = importlib.import_module("fumehood.executors.inside")
    parts = importlib.import_module("fumehood.executors.parts")
    libraries: list[str] = config["libraries"]
    function = _FunctionProgram(libraries, inside.answer, parts.Parts)
    filter_program = filters.build_jail_filter()

    def prepare(supervisor_pid: int) -> None:
        run_child(
            supervisor_pid=supervisor_pid,
            programs={"function": function.run, "probe": run_probe},
            warm_up=_warm_up,
            filter_program=filter_program,
            open_files=OPEN_FILES,
            hide_files=lambda: restrict_to([*libraries, *config["tool_paths"]]),
        )

    return prepare


class _FunctionProgram:
    """The program `function`, which calls one function of a tool. Its request is `{module, name,
    import_path, pickled, arguments, stream?}`. If the function is imported by its name, `pickled`
    is empty. Otherwise, it is the function as a pickle. If there is `stream`, the function yields
    its result in parts.
    """

    def __init__(
        self,
        libraries: list[str],
        answer: Callable[..., dict[str, Any]],
        parts: Callable[..., object],
    ) -> None:
        self._libraries = libraries
        self._answer = answer
        self._parts = parts
        self._second_filter = filters.build_second_filter()
        self._reports = 0

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the function that `request` names. Before the function is imported, file access is
        restricted to the libraries and the function's import path. Return the reply, which has the
        function's result or its error.
        """
        wanted = request["arguments"]
        # A pickled function has no import path, and can read only the libraries.
        own = [wanted["import_path"]] if wanted["import_path"] else []
        restrict_to([*self._libraries, *own])
        seccomp.install(self._second_filter)
        sys.path[:0] = [path for path in own if path not in sys.path]
        stream = wanted.get("stream")
        hear = _tell_part if stream and stream["is_followed"] else None
        return self._answer(
            wanted["module"],
            wanted["name"],
            wanted["arguments"],
            pickled=wanted.get("pickled", ""),
            report=self._report,
            parts=self._parts(stream["max_bytes"], hear) if stream else None,
        )

    def _report(self, percent: float, message: str) -> None:
        if self._reports < MAX_REPORTS:
            self._reports += 1
            tell({"progress": {"percent": percent, "message": message}})


def _tell_part(text: str) -> None:
    tell({"part": text})


def _warm_up() -> None:
    """Touch the memory pages that every function needs. A child does this before it gets its
    request, so that no call waits for it.
    """
    os.environ.update(ENVIRONMENT)
    asyncio.run(asyncio.sleep(0))
