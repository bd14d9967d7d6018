"""The child in a container: the one process in which a call's program begins.

Guest side, forked by the zygote, in two steps. First it stands ready as root, limited, filtered and
warmed, where no program can reach it, and waits for one byte. Then it becomes the programs' user,
for good, and only after that reads its request. What it tells at its end is a claim; how it ended,
the supervisor learns from the kernel.
"""

from __future__ import annotations

import base64
import fcntl
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from fumehood.guest import kernel, seccomp
from fumehood.guest.container import probe
from fumehood.guest.container.filter import build_container_filter
from fumehood.guest.container.user import REQUEST_FAILED, SEAL_FAILED, become_user
from fumehood.guest.languages import python
from fumehood.wire import framing

WORKSPACE = "/workspace"

REQUEST_FD = 3
REPLY_FD = 4
GO = b"G"

CHUNK_BYTES = 1 << 16
NICENESS = 10
"""A program that fills every processor must leave the supervisor enough to end it."""

ENVIRONMENT = {
    "HOME": WORKSPACE,
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TMPDIR": "/tmp",  # noqa: S108  # the container's own
    "USER": "sandbox",
}

MEMORY_REPLY = framing.encode(
    {"error": {"kind": "memory", "message": "the program needed more memory than its limit"}}
)
"""Encoded ahead: a process without memory cannot build its own excuse."""

Program = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""Takes a call's arguments, gives the exit code and the claim."""


class SetUpFailed(Exception):
    """The request cannot be carried out here; said before any of the program ran."""


def preload(config: dict[str, Any]) -> Callable[[list[int]], None]:
    """Load what every program needs; what prepares a forked child comes back."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv[:] = ["main.py"]
    sys.path[:] = [WORKSPACE, *(path for path in sys.path if path not in config["import_paths"])]
    sys.path += config.get("site_paths", [])
    filter_program = build_container_filter()
    limits = (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, int(config["nofile"])),
        (resource.RLIMIT_FSIZE, int(config["fsize_bytes"])),
    )
    python.preload()
    programs: dict[str, Program] = {"python": _run_python, "probe": probe.run}
    _forget_the_guest(config["import_paths"])

    def prepare(descriptors: list[int]) -> None:
        try:
            _keep_only(descriptors)
            _get_ready(limits, filter_program)
        except BaseException as fault:
            _write(framing.encode({"ready": False, "fault": f"{type(fault).__name__}: {fault}"}))
            os._exit(SEAL_FAILED)
        _write(framing.encode({"ready": True}))
        if os.read(REQUEST_FD, 1) != GO:
            os._exit(0)
        try:
            _seal()
        except BaseException as fault:  # sealed or dead: nothing may run in between
            _write(framing.encode({"ready": False, "fault": f"{type(fault).__name__}: {fault}"}))
            os._exit(SEAL_FAILED)
        _serve(programs)

    return prepare


def _forget_the_guest(import_paths: list[str]) -> None:
    """Programs find none of the guest's modules; those that are loaded stay where they are used."""
    for name in [name for name in sys.modules if name.split(".")[0] == "fumehood"]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in import_paths]


def _keep_only(descriptors: list[int]) -> None:
    """Leave this process /dev/null on 0, its two streams on 1 and 2, its two pipes, no more."""
    # Moved out of the way first: each may stand on another's final number.
    request_fd, reply_fd, out_fd, err_fd = (_above_standard(fd) for fd in descriptors)
    null = _above_standard(os.open("/dev/null", os.O_RDWR))
    for source, target in (
        (null, 0), (out_fd, 1), (err_fd, 2), (request_fd, REQUEST_FD), (reply_fd, REPLY_FD),
    ):  # fmt: skip
        os.dup2(source, target)
    os.closerange(REPLY_FD + 1, 1024)


def _above_standard(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64)


def _get_ready(limits: tuple[tuple[int, int], ...], filter_program: bytes) -> None:
    """All that can be done ahead: still root, and out of every program's reach."""
    os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    _volunteer_for_oom()
    kernel.warm_up()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _warm_up()
    gc.collect()
    python.get_ready()
    os.umask(0o022)
    os.chdir(WORKSPACE)
    for which, value in limits:
        resource.setrlimit(which, (value, value))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(filter_program)


def _warm_up() -> None:
    """Run a dummy program on null devices; the real streams and the real end come later."""
    kept = [_above_standard(number) for number in (1, 2)]
    null = os.open("/dev/null", os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)
    python.warm_up()
    for number, real in zip((1, 2), kept, strict=True):
        os.dup2(real, number)
        os.close(real)


def _volunteer_for_oom() -> None:
    """Where memory runs out, the kernel takes a program first and never the supervisor."""
    try:
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
    except OSError:
        pass  # a wish, not a wall: some hosts mount /proc read-only


def _seal() -> None:
    """Give up the last that it has. Limits and filter stand since it was made ready."""
    become_user()
    # A change of user takes it away, and with it a program's view of its own descriptors.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _serve(programs: dict[str, Program]) -> None:
    """Run the one program that the request names, tell the claim, end with its exit code."""
    own_pid, reply = os.getpid(), os.fstat(REPLY_FD)
    exit_code = REQUEST_FAILED
    frame = b""
    try:
        request = _read_frame()
        exit_code, claim = programs[request["program"]](request["arguments"])
        frame = framing.encode(claim)
    except SetUpFailed as fault:
        frame = framing.encode({"error": {"kind": "invalid", "message": str(fault)}})
    except MemoryError:
        exit_code = exit_code if exit_code != REQUEST_FAILED else python.FAILED
        frame = MEMORY_REPLY
    except BaseException as fault:
        exit_code = python.FAILED
        message = f"{type(fault).__name__} outside the program"
        frame = framing.encode({"error": {"kind": "exception", "message": message}})
    finally:
        # A program may have forked, and put something else in this descriptor's place.
        try:
            if os.getpid() == own_pid and os.fstat(REPLY_FD).st_ino == reply.st_ino:
                _write(frame)
        except BaseException:
            pass
        os._exit(exit_code)


def _run_python(arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    for file in arguments.get("files") or []:
        _put(file)
    if arguments.get("stdin"):  # without any it is the null device, which ends at once
        stdin = os.memfd_create("stdin", 0)
        _write_all(stdin, arguments["stdin"].encode("utf-8"))
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.close(stdin)
    return python.run(arguments["code"])


def _put(file: dict[str, Any]) -> None:
    """Write one of the caller's files into the workspace, whose paths the host has checked."""
    path = os.path.join(WORKSPACE, file["path"])
    try:
        if "content_base64" in file:
            content = base64.b64decode(file["content_base64"])
        else:
            content = file["content"].encode("utf-8")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            _write_all(target, content)
        finally:
            os.close(target)
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else str(fault)
        raise SetUpFailed(f"the file {file['path']} could not be written: {reason}") from None


def _read_frame() -> dict[str, Any]:
    header = _read_exactly(framing.HEADER.size)
    (length,) = framing.HEADER.unpack(header)
    return framing.parse_body(_read_exactly(length))


def _read_exactly(count: int) -> bytes:
    chunks = []
    while count:
        chunk = os.read(REQUEST_FD, min(count, CHUNK_BYTES))
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def _write(data: bytes) -> None:
    _write_all(REPLY_FD, data)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
