"""Fumehood commands, forked from a process with their modules preloaded.

Starting `fumehood` takes most of a second of processor time and `fumehood serve` two, nearly all of
it for imports, and the tests start them hundreds of times. A command that is started here is a
process of its own, a child of the test run, with the arguments, environment, directory, descriptors
and user that the test gave it; only its imports were made before. That goes for the script
`fumehood`, for `-m MODULE` and `-c PROGRAM` of an `Interpreter`, and for `fumehood` and
`python FILE.py` in a shell whose path begins with `commands()`. `--cold-start` starts every command
from nothing, as users do.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import inspect
import io
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

_REQUEST_BYTES = 1 << 20
_PID = struct.Struct("!i")
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_UNUSUAL = ("preexec_fn", "shell")
"""`Popen` options that only a real start supports."""


class Interpreter(str):
    """The path of an interpreter whose processes may be forked from the preloaded one."""

    __slots__ = ("import_path",)
    import_path: str
    """The `PYTHONPATH` with which it finds the engine."""

    def __new__(cls, path: str, import_path: str = "") -> Interpreter:
        made = super().__new__(cls, path)
        made.import_path = import_path
        return made


PYTHON = Interpreter(sys.executable)


class Preloader:
    """A process that commands are forked from."""

    def __init__(self, python: Interpreter) -> None:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": python.import_path}
        self.place = Path(tempfile.mkdtemp(prefix="fhp-", dir="/tmp"))
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.place / "socket"))
            listener.listen()
            descriptors = [theirs.fileno(), listener.fileno()]
            self._process = _real_popen(
                [python, __file__, *map(str, descriptors)], pass_fds=descriptors,
                stdin=subprocess.DEVNULL, start_new_session=True, env=environment,
            )  # fmt: skip

    def fork(self, request: Mapping[str, Any], descriptors: list[int]) -> int:
        """A child of this process that runs a command; its process id."""
        rights = array.array("i", descriptors)
        self._orders.sendmsg(
            [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )
        (pid,) = _PID.unpack(self._orders.recv(_PID.size))
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return int(pid)


_real_popen = subprocess.Popen
_preloader = cache(Preloader)


SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
if {script!r} == sys.executable and not "".join(sys.argv[1:2]).endswith(".py"):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
umask = os.umask(0o022)
request = {{
    "arguments": [{script!r}, *sys.argv[1:]], "environment": dict(os.environ), "umask": umask,
    "directory": os.getcwd(), "passed": [], "new_session": False,
    "ignores_interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    "gids": None, "gid": None, "uid": None,
}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as preloader:
    preloader.connect({socket!r})
    socket.send_fds(preloader, [json.dumps(request).encode()], [0, 1, 2])
    code = int(preloader.recv(10))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def commands(script: str) -> Path:
    """A directory for the path of a shell, with this script or a program that stands for it."""
    return Path(script).parent if subprocess.Popen is _real_popen else _quick_commands(script)


@cache
def _quick_commands(script: str) -> Path:
    place = _preloader(PYTHON).place
    for name, path in ((Path(script).name, script), ("python", sys.executable)):
        text = SCRIPT.format(python=sys.executable, script=path, socket=str(place / "socket"))
        (place / name).write_text(text, encoding="utf-8")
        (place / name).chmod(0o700)
    return place


def start_from_preloaded(script: str) -> type[subprocess.Popen[Any]]:
    """`subprocess.Popen`, but for commands that begin with this script."""

    class Popen(_real_popen):  # type: ignore[misc, valid-type]
        def _execute_child(self, *given: Any) -> None:
            start = _SIGNATURE.bind(self, *given).arguments
            given_arguments = (
                [start["args"]] if isinstance(start["args"], str) else [*start["args"]]
            )
            python, arguments = given_arguments[0], [*map(os.fsdecode, given_arguments)]
            if arguments[0] == script:
                python = PYTHON
            elif not isinstance(python, Interpreter) or arguments[1] not in ("-m", "-c"):
                python = None
            if python is None or any(start[name] not in (None, False) for name in _UNUSUAL):
                super()._execute_child(*given)
                return
            environment = dict(os.environ if start["env"] is None else start["env"])
            pipes = [start["p2cread"], start["c2pwrite"], start["errwrite"]]
            standard = [pipe if pipe != -1 else own for own, pipe in enumerate(pipes)]
            passed = list(start["pass_fds"])
            request = {
                "arguments": arguments,
                "environment": environment,
                "directory": os.fsdecode(start["cwd"] or os.getcwd()),
                "passed": passed,
                "new_session": bool(start["start_new_session"]),
                "ignores_interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
                **{name: start[name] for name in ("gids", "gid", "uid")},
            }
            request["umask"] = os.umask(0o022)
            os.umask(request["umask"])
            self.pid = _preloader(python).fork(request, [*standard, *passed])
            self._child_created = True
            self._close_pipe_fds(
                *(start[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
                start["errread"], start["errwrite"],
            )  # fmt: skip

    return Popen


# -- in the process that is forked from --------------------------------------------------------


def _serve(orders: socket.socket, listener: socket.socket) -> None:
    for module in pkgutil.iter_modules(_commands().__path__, "fumehood.cli."):
        __import__(module.name)
    for name in _LOADED_LATER:
        __import__(name)
    for entry_point in entry_points(group="fumehood.tools"):
        if entry_point.module.startswith("fumehood_tools."):
            entry_point.load()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for `_attend`
    libc = ctypes.PyDLL(None, use_errno=True)
    while True:
        ready, _, _ = select.select([orders, listener], [], [])
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                _attend(connection)
            connection.close()
        if orders not in ready:
            continue
        request, descriptors = _receive(orders)
        if request is None:
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            return
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = libc.syscall(_CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            _become(request, descriptors)
        error = ctypes.get_errno()
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        orders.sendall(_PID.pack(pid if pid > 0 else -error))
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Receive a request with its descriptors, or None at the end."""
    message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 64)
    return json.loads(message) if message else None, descriptors


def _attend(connection: socket.socket) -> NoReturn:
    """A command that a shell has started: it ends with the program that stands for it there."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors = _receive(connection)
    pid = os.fork()
    if pid == 0:
        _become(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    command = os.pidfd_open(pid)
    ready, _, _ = select.select([connection, command], [], [])
    if command not in ready:
        os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    try:
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)


def _commands() -> Any:
    import fumehood.cli

    return fumehood.cli


_LOADED_LATER = (
    "fumehood.http.server",
    "fumehood.engine",
    "fumehood.client",
    "fumehood.testing",
    "anyio._backends._asyncio",
    "anyio._core._signals",
    "anyio._core._sockets",
    "anyio._core._subprocesses",
    "uvicorn.lifespan.off",
)
"""Modules that commands import lazily or only in some cases."""

_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}
"""*Source*: clone(2), as in `fumehood.guest.core.kernel`."""


def _become(request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the requested command to its end."""
    if request["new_session"]:
        os.setsid()
    moved = [os.dup2(descriptor, 500 + number) for number, descriptor in enumerate(descriptors)]
    targets = [0, 1, 2, *request["passed"]]
    os.closerange(3, 500)
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target)
    os.closerange(500, 500 + len(moved))
    os.umask(request["umask"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    interrupt = signal.SIG_IGN if request["ignores_interrupt"] else signal.default_int_handler
    signal.signal(signal.SIGINT, interrupt)
    _change_user(request)
    own_path = _paths(os.environ.get("PYTHONPATH"))
    sys.path[:] = own_path + [path for path in sys.path if path not in _FOUND_ENGINE]
    for name, descriptor, mode, errors in (
        ("stdin", 0, "r", "strict"), ("stdout", 1, "w", "strict"),
        ("stderr", 2, "w", "backslashreplace"),
    ):  # fmt: skip
        raw = io.FileIO(descriptor, mode, closefd=False)
        buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        lines = name == "stderr" or raw.isatty()
        stream = io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os._exit(_run(request["arguments"]))


_FOUND_ENGINE: list[str] = []
"""The import path of this process."""


def _paths(variable: str | None) -> list[str]:
    return variable.split(os.pathsep) if variable else []


def _change_user(request: Mapping[str, Any]) -> None:
    """As `subprocess` does; a program that was started anew could read `/proc/self`."""
    if request["gids"] is not None:
        os.setgroups(request["gids"])
    if request["gid"] is not None:
        os.setregid(request["gid"], request["gid"])
    if request["uid"] is not None:
        os.setreuid(request["uid"], request["uid"])
        set_dumpable = 4
        ctypes.CDLL(None).prctl(set_dumpable, 1, 0, 0, 0)


def _start(arguments: list[str]) -> None:
    """Run the command line as the interpreter would."""
    if arguments[1:2] == ["-m"]:
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = arguments[2:]
        sys.modules.pop(arguments[2], None)
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    elif arguments[1:2] == ["-c"]:
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *arguments[3:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[2], "<string>", "exec"), main.__dict__)
    elif arguments[0] == sys.executable:
        file = Path(arguments[1]).absolute()
        sys.path.insert(0, str(file.parent))
        sys.argv[:] = arguments[1:]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        main.__file__ = str(file)
        exec(compile(file.read_bytes(), arguments[1], "exec"), main.__dict__)
    else:
        from fumehood.cli.main import main as command

        sys.argv[:] = arguments
        command()


def _run(arguments: list[str]) -> int:
    """Run a program and end it as the interpreter does."""
    code: Any = 0
    try:
        _start(arguments)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    return code or 0


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    _FOUND_ENGINE += _paths(os.environ.get("PYTHONPATH"))
    _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
