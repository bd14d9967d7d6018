"""The jail: prepares a child that imports and calls one function of a tool.

Guest side, between zygote and child. The child gives up its file access in two steps. Before it
reads its request, it restricts itself to the interpreter, the libraries and the import paths of all
tools. Once it knows the requested function, it keeps only the libraries and that function's import
path, and gives up the system calls for such restrictions. Only then is the tool's code imported.

The zygote preloads the public names of `fumehood` that a tool's module needs. It loads them by
name, because a guest module may import nothing of the engine but framing.

Landlock restricts the access. Invariant: a process restricted here can read beneath the given paths
and nowhere else, and can write and execute nothing. A given path that is created later stays
unreadable. Each further restriction can only remove access.

*Source*: landlock(7), <linux/landlock.h>; ABI 1 (Linux 5.13) to 7. Older kernels restrict fewer
kinds of access. The file rights that this wall relies on are all in ABI 1 except truncation (ABI
3), which the system-call filter also refuses.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Any

from fumehood.guest.core import kernel, seccomp
from fumehood.guest.core.pipes import held, tell
from fumehood.guest.core.syscalls import own_number
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


# -- Landlock -------------------------------------------------------------------------------

_CREATE_RULESET = own_number("landlock_create_ruleset")
_ADD_RULE = own_number("landlock_add_rule")
_RESTRICT_SELF = own_number("landlock_restrict_self")

_ASK_FOR_VERSION = 1
_RULE_PATH_BENEATH = 1
_READ_FILE = 1 << 2
_READ_DIRECTORY = 1 << 3

# ABI → the rights that it adds to those of earlier ABIs.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_NET_RIGHTS = {4: 0b11}
_SCOPES = {6: 0b11}
"""Scopes that keep abstract Unix sockets and signals from leaving the jail."""


class Unavailable(OSError):
    """The kernel lacks Landlock, or has it disabled."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict_to(readable: Iterable[str]) -> None:
    """Allow this process to read files at or below the paths `readable`, and no other file access.
    Paths that cannot be opened are ignored. `no_new_privs` must already be set for the process.

    Raises:
        Unavailable: the kernel has no Landlock.
        OSError: the kernel refuses.
    """
    try:
        version = kernel.syscall(_CREATE_RULESET, 0, 0, _ASK_FOR_VERSION)
    except OSError:
        raise Unavailable("the kernel has no Landlock") from None
    attributes = _RulesetAttributes(
        _up_to(version, _FILE_RIGHTS), _up_to(version, _NET_RIGHTS), _up_to(version, _SCOPES)
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)  # type: ignore[arg-type]
    with held(ruleset):
        for path in readable:
            _allow_reading(ruleset, path)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    with held(place):
        rights = _READ_FILE
        if stat.S_ISDIR(os.fstat(place).st_mode):
            rights |= _READ_DIRECTORY
        rule = _PathBeneath(rights, place)
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)  # type: ignore[arg-type]


def _up_to(version: int, rights: dict[int, int]) -> int:
    found = 0
    for since, mask in rights.items():
        if since <= version:
            found |= mask
    return found
