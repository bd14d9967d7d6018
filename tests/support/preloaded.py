"""Commands of ours, started from a process that has loaded their modules already.

Starting `fumehood` takes most of a second of processor time, nearly all of it for imports, and the
tests start it hundreds of times. A command that is started here is a process of its own, a child of
the test run, with the arguments, environment, directory and descriptors that the test gave it; only
its imports were made before. `--cold-start` starts every command from nothing, as users do; so do
tests that start it through a shell, as another user or with other import paths.
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
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

_REQUEST_BYTES = 1 << 20
_PID = struct.Struct("!i")
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_UNUSUAL = ("preexec_fn", "shell", "gids", "gid", "uid")
"""What only the real way of starting a process does."""


class Preloader:
    """A process that commands are forked from."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _real_popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True, env={"PATH": os.environ["PATH"]},
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


def start_from_preloaded(script: str) -> type[subprocess.Popen[Any]]:
    """`subprocess.Popen`, but for commands that begin with this script."""

    class Popen(_real_popen):  # type: ignore[misc, valid-type]
        def _execute_child(self, *given: Any) -> None:
            start = _SIGNATURE.bind(self, *given).arguments
            arguments = [] if isinstance(start["args"], str) else [*map(os.fsdecode, start["args"])]
            is_usual = all(start[name] in (None, False) for name in _UNUSUAL)
            if arguments[:1] != [script] or not is_usual or "PYTHONPATH" in (start["env"] or {}):
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
            }
            request["umask"] = os.umask(0o022)
            os.umask(request["umask"])
            self.pid = _preloader().fork(request, [*standard, *passed])
            self._child_created = True
            self._close_pipe_fds(
                *(start[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
                start["errread"], start["errwrite"],
            )  # fmt: skip

    return Popen


# -- in the process that is forked from --------------------------------------------------------


def _serve(orders: socket.socket) -> None:
    for module in pkgutil.iter_modules(_commands().__path__, "fumehood.cli."):
        __import__(module.name)
    __import__("fumehood.http.server")
    __import__("fumehood.engine")
    gc.collect()
    gc.freeze()
    libc = ctypes.PyDLL(None, use_errno=True)
    while True:
        descriptors = array.array("i")
        message, ancillary, _, _ = orders.recvmsg(
            _REQUEST_BYTES, socket.CMSG_SPACE(64 * descriptors.itemsize)
        )
        if not message:
            return
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = libc.syscall(_CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            orders.close()
            _become(json.loads(message), list(descriptors))
        error = ctypes.get_errno()
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        orders.sendall(_PID.pack(pid if pid > 0 else -error))
        for descriptor in descriptors:
            os.close(descriptor)


def _commands() -> Any:
    import fumehood.cli

    return fumehood.cli


_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}
"""*Source*: clone(2), as in `fumehood.guest.core.kernel`."""


def _become(request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """The command that the request names, to its end."""
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
    interrupt = signal.SIG_IGN if request["ignores_interrupt"] else signal.default_int_handler
    signal.signal(signal.SIGINT, interrupt)
    sys.argv[:] = request["arguments"]
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
    os._exit(_run())


def _run() -> int:
    """As the interpreter ends a program."""
    code: Any = 0
    try:
        from fumehood.cli.main import main

        main()
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
    _serve(socket.socket(fileno=int(sys.argv[1])))
