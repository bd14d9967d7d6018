"""The child in a container: the process in which a call's program starts.

Guest side, forked by the zygote. A child first waits for one byte. While it waits, its limits and
its system-call filter are already in force, and it is warmed up, but it still runs as root, so that
no program can touch it. Then the child irrevocably becomes the programs' user, and only after that
does it read its request. The final message of the child is only a claim; how the child ended is
reported by the kernel.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fumehood.guest.container import files, link
from fumehood.guest.container.filter import build_container_filter
from fumehood.guest.container.forks import HOOKS
from fumehood.guest.container.places import MARK, MOUNTS, TEMPORARY, WORKSPACE
from fumehood.guest.container.processes import REQUEST_FAILED, SUPERVISOR, become_user
from fumehood.guest.container.request import (
    SetUpFailed,
    memory_file,
    read_request,
    set_up,
)
from fumehood.guest.core import kernel, seccomp
from fumehood.guest.core.pipes import (
    MEMORY_REPLY,
    REPLY_FD,
    REQUEST_FD,
    SEAL_FAILED,
    tell,
    write_all,
)
from fumehood.guest.languages import python, shell
from fumehood.protocol import framing

GO = b"G"

IMAGE_PATH = "/opt/fumehood/image.json"
"""The file in which the image describes itself. It is owned by root, and was written when the image
was built.
"""

OUT_FD = link.WAKE_FD + 1
ERR_FD = OUT_FD + 1
"""`OUT_FD` and `ERR_FD` are the descriptors of a child's output streams until the child is ready.
The zygote receives the ends of each child's other pipes directly under their final numbers, from
`REQUEST_FD` on.
"""

REHEARSALS = 16
"""Number of times that the zygote runs the warm-up program. Python rewrites the bytecode of
functions that run often. If it does so in the zygote, the children share the memory pages of this
bytecode.
"""

NICENESS = 10
"""Scheduling priority (niceness) of programs. The supervisor has a higher priority, so that it gets
enough CPU time to end a program that uses all processors.
"""

HOME = {"HOME": WORKSPACE}
"""The variable that sets the home directory of programs. It is not set in zygotes, because
libraries read settings from this directory, and programs can write to it.
"""

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TMPDIR": TEMPORARY,
    "USER": "sandbox",
}

Program = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""A function that takes a call's arguments, runs the program, and returns the exit code and the
claim."""


@dataclass(frozen=True, slots=True)
class Image:
    """The part of an image's description that the zygote uses."""

    preload: tuple[str, ...] = ()
    site_paths: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    late_paths: tuple[str, ...] = ()
    """Import paths that only Python programs get. Callers choose the packages in these paths. So
    none of their code may run in the zygote, or in a child that runs the engine's own code.
    """


def read_image(path: str = IMAGE_PATH) -> Image:
    """Read the description of this image from the file `path`. A missing file means an empty
    description.

    Raises:
        ValueError, KeyError, TypeError: the file is invalid.
    """
    try:
        with open(path, encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return Image()
    return Image(
        preload=tuple(map(str, told.get("preload", ()))),
        site_paths=tuple(map(str, told.get("site_paths", ()))),
        environment={str(key): str(value) for key, value in told.get("environment", {}).items()},
        late_paths=tuple(map(str, told.get("late_paths", ()))),
    )


def limits_of(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the resource limits that are the same for all programs, as pairs of the resource's
    number and the value.
    """
    return [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, int(config["nofile"])),
        (resource.RLIMIT_FSIZE, int(config["fsize_bytes"])),
    ]


def preload(config: dict[str, Any], *, thin: bool) -> Callable[[], None]:
    """Prepare this zygote: load modules for programs, and apply the limits and the system-call
    filter. If `thin` is False, also load the modules that the image preloads.

    Return the function that must run in each forked child.
    """
    image = read_image()
    os.environ.clear()
    os.environ.update(ENVIRONMENT | image.environment)
    sys.argv[:] = ["main.py"]
    guest_paths = tuple(config["import_paths"])
    sys.path[:] = [path for path in sys.path if not path.startswith(guest_paths)]
    sys.path += image.site_paths
    refuse_writable_places()
    memory_bytes = int(config["memory_bytes"])
    python.preload(() if thin else image.preload)
    refuse_writable_places()
    if thin and image.preload:
        python.expect_late()
    programs: dict[str, Program] = {
        "python": lambda arguments: _run_python(arguments, memory_bytes),
        "shell": _run_shell,
        "javascript": lambda arguments: _run_javascript(arguments, memory_bytes),
        "files": files.run,
        "probe": run_probe,
    }
    _forget_the_guest()
    _open_streams()
    os.umask(0o022)
    for which, value in limits_of(config):
        resource.setrlimit(which, (value, value))
    # Once, and not in each child: children inherit the filter, and installing it takes a while.
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(
        build_container_filter(is_watched=config["is_watched"], is_shared=MARK is not None)
    )

    def prepare() -> None:
        try:
            _get_ready()
            _take_places()
        except BaseException as fault:
            tell({"ready": False, "fault": f"{type(fault).__name__}: {fault}"})
            os._exit(SEAL_FAILED)
        tell({"ready": True})
        if os.read(REQUEST_FD, 1) != GO:
            os._exit(0)
        try:
            _seal()
        except BaseException as fault:  # a child that is not sealed must end
            tell({"ready": False, "fault": f"{type(fault).__name__}: {fault}"})
            os._exit(SEAL_FAILED)
        _serve(programs, memory_bytes, image.late_paths)

    return prepare


def refuse_writable_places() -> None:
    """Check that this process, which runs as root, imports nothing from a directory that programs
    can write.

    Raises:
        ImportError: such a directory is in the import path, was searched for modules, or contains a
            loaded module.
    """
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    places = {os.path.dirname(path) for path in loaded if path}
    for place in sorted({*sys.path, *sys.path_importer_cache, *places}):
        if os.path.realpath(place).startswith(MOUNTS):
            raise ImportError(f"modules are searched in {place}, which programs can write")


def _forget_the_guest() -> None:
    """Remove the guest's modules from `sys.modules`, so that programs do not find them. The guest
    can still use the modules.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "fumehood"]:
        del sys.modules[name]


def _take_places() -> None:
    """Connect standard output and standard error to this child's own pipes, `OUT_FD` and `ERR_FD`.
    Then close all descriptors from `OUT_FD` on.
    """
    os.dup2(OUT_FD, 1)  # until now the null device, as is 2
    os.dup2(ERR_FD, 2)
    os.closerange(OUT_FD, 1024)


def _open_streams() -> None:
    """Create the zygote's standard stream objects, and run the warm-up program with them. Its
    output is dropped.

    Children inherit these objects, and later connect the objects' descriptors to pipes of their
    own.
    """
    kept = fcntl.fcntl(2, fcntl.F_DUPFD, 64)
    null = os.open("/dev/null", os.O_RDWR)  # often gets the number 0 itself
    os.dup2(null, 0)
    readable, writable = os.pipe()
    for number in (1, 2):
        os.dup2(writable, number)
    python.open_standard_streams()
    for number in (1, 2):
        os.dup2(null, number)
    try:
        for _ in range(REHEARSALS):
            python.warm_up()
    finally:
        os.dup2(kept, 2)
    for descriptor in (kept, readable, writable):
        os.close(descriptor)


def _get_ready() -> None:
    """Do everything in this child that does not depend on its request. The child still runs as
    root, so programs cannot access it.
    """
    os.dup2(0, 2)  # the null device, as 0 and 1: output of the guest itself is dropped
    os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    HOOKS.resume()
    kernel.warm_up()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    python.warm_up()
    python.get_ready()


def _seal() -> None:
    """Become the programs' user and give up all remaining rights. The limits and the system-call
    filter are already in force.
    """
    # If memory runs out, a program ends before a child that waits, a zygote or the supervisor.
    kernel.volunteer_for_oom()
    become_user()
    # A change of user clears this flag, and then a program could not list its own descriptors.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    os.environ.update(HOME)
    os.chdir(WORKSPACE)


def _serve(programs: dict[str, Program], memory_bytes: int, late_paths: tuple[str, ...]) -> None:
    """Run the program that the request names, send its claim, and exit with its exit code.

    `programs` maps the names of all programs to their functions. `memory_bytes` is the memory
    limit of programs. `late_paths` are import paths that only Python programs get.
    """
    own_pid, reply = os.getpid(), os.fstat(REPLY_FD)
    exit_code = REQUEST_FAILED
    frame = b""
    try:
        request = read_request()
        if request["program"] == "python":  # only then the caller's code runs in this process
            sys.path[:] = [WORKSPACE, *sys.path, *late_paths]
        if request.get("keep") and request["program"] == "python":
            _serve_session(request, memory_bytes)
        os.close(link.ORDERS_FD)
        os.close(link.WAKE_FD)
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
                write_all(REPLY_FD, frame)
        except BaseException:
            pass
        os._exit(exit_code)


def _serve_session(request: dict[str, Any], memory_bytes: int) -> None:
    """Run the calls of a session one after the other, with the same variables. This function never
    returns.

    `request` is the request of the first call. Later calls run in this process, or in a copy that
    has taken its place (see `link`). If an exception is raised, no further call runs with these
    variables. `_serve` then reports the exception to the host and ends the process.
    """
    program = python.Program(memory_bytes, _report)
    while True:
        pid = os.getpid()
        try:
            restore = set_up(request["arguments"])
            arguments = request["arguments"]
            exit_code, claim = program.run(arguments["code"], arguments)
            restore()
        except SetUpFailed as fault:
            exit_code = REQUEST_FAILED
            claim = {"error": {"kind": "invalid", "message": str(fault)}}
        if os.getpid() != pid:
            os._exit(exit_code)  # the program forked, and this is its child
        program.pause()
        link.hand_on(exit_code, claim)
        python.open_standard_streams()
        request = read_request()


def _run_python(arguments: dict[str, Any], memory_bytes: int) -> tuple[int, dict[str, Any]]:
    set_up(arguments)
    program = python.Program(memory_bytes, _report)
    ending = program.run(arguments["code"], arguments)
    program.finish()
    return ending


def _run_shell(arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    set_up(arguments)
    shell.become_bash(arguments["command"], arguments.get("argv"))


def _run_javascript(arguments: dict[str, Any], memory_bytes: int) -> tuple[int, dict[str, Any]]:
    if arguments.get("standby"):
        shell.become_node(REQUEST_FD, memory_bytes)
    request = framing.encode({"arguments": arguments})
    shell.become_node(memory_file("request", request), memory_bytes)


def _report(percent: float, message: str) -> None:
    """Send a progress report in a single write, so that the reports of several threads do not
    mix.
    """
    try:
        shown = framing.whole_words(message, framing.MAX_REPORT_CHARACTERS)
        tell({"progress": {"percent": percent, "message": shown}})
    except (OSError, ValueError):
        pass  # the pipe is closed, or `percent` is not finite


PROBED_LIMITS = {
    "Max open files": resource.RLIMIT_NOFILE,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max processes": resource.RLIMIT_NPROC,
}
"""Name of a resource limit that the probe reports → its number. The probe is a program that attacks
the wall.
"""


MOST_FORKED = 4096
"""Maximum number of processes that the probe starts."""


def run_probe(arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Try every attack on the sandbox, and tell the supervisor which attacks were refused. Then
    loop until this process is killed.

    `arguments` are ignored, and nothing is returned. The signature is the one that all programs
    have.
    """
    held = {name: _is_refused(attack) for name, attack in ATTACKS.items()}
    limits = {name: resource.getrlimit(which)[1] for name, which in PROBED_LIMITS.items()}
    if MARK is not None:
        limits["forked"] = _fork_until_refused()
    tell({"probe": held, "limits": limits})
    while True:
        pass


def _fork_until_refused() -> int:
    """Start processes until the operating system refuses one. Return how many there are then, with
    this one. They live until this process has ended.
    """
    readable, writable = os.pipe()
    for count in range(1, MOST_FORKED):
        try:
            pid = os.fork()
        except OSError:
            return count
        if pid == 0:
            os.close(writable)
            os.read(readable, 1)
            os._exit(0)
    return MOST_FORKED


def _is_refused(attack: Callable[[], object]) -> bool:
    try:
        attack()
    except (OSError, ValueError):  # ValueError: how Python names a refused change of a limit
        return True
    return False


def _open_for_writing(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


SHARED_ATTACKS: dict[str, Callable[[], object]] = {
    "internet_socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "unix_socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    "list_root": lambda: os.listdir("/"),
    "write_beside": lambda: _open_for_writing(f"{os.path.dirname(WORKSPACE)}/probe"),
    "change_beside": lambda: os.chmod(os.path.dirname(WORKSPACE), 0o700),
    "touch_beside": lambda: os.utime(os.path.dirname(WORKSPACE)),
    "raise_mark": lambda: resource.setrlimit(resource.RLIMIT_RTTIME, (0, 0)),
    "limit_supervisor": lambda: resource.prlimit(SUPERVISOR, resource.RLIMIT_CORE),
}
"""What only the filter, Landlock and the warden refuse if the host gives no namespaces."""

ATTACKS: dict[str, Callable[[], object]] = {
    "write_to_root": lambda: _open_for_writing("/opt/fumehood-probe"),
    "become_root": lambda: os.setresuid(0, 0, 0),
    "read_supervisor_memory": lambda: os.open(f"/proc/{SUPERVISOR}/mem", os.O_RDONLY),
    "speak_for_supervisor": lambda: _open_for_writing(f"/proc/{SUPERVISOR}/fd/1"),
    "stop_supervisor": lambda: os.kill(SUPERVISOR, 19),
    "packet_socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "virtual_machine_socket": lambda: socket.socket(40, socket.SOCK_STREAM),
    **(SHARED_ATTACKS if MARK is not None else {}),
}
