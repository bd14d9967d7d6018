"""Requests to the launcher, and its start.

Host side, blocking: used by the runtime in threads, and by commands. If no launcher runs, a request
starts one. It outlives the process that has started it.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fumehood.core.json_types import JsonObject
from fumehood.direct.launcher import MAX_BYTES, VERSION

IDLE_S = 60.0
"""Seconds after which a launcher without sandboxes ends."""

START_S = 10.0
"""Maximum seconds until a new launcher serves its socket."""

ANSWER_BYTES = 4 << 20
"""Maximum length of an answer."""

STEP_OUTPUT_BYTES = 64 * 1024
"""Maximum length of the output of a build step that is kept."""

STEP_PAUSE_S = 0.05
"""Seconds between two looks at a build step."""

LAST_WORDS_BYTES = 1000
"""Maximum length of what an error quotes from the launcher's log."""

START_PAUSE_S = 0.02
"""Seconds between two attempts to reach a launcher that starts."""

RESET_PAUSES_S = (0.02, 0.1, 0.5)
"""Seconds between the attempts to send a request, if the launcher is killed with it."""

VARIABLE = "FUMEHOOD_LAUNCHER_DIRECTORY"
"""Environment variable: where the launcher's directory is, instead of `/run/fumehood`."""

REQUEST_S = 30.0
"""Maximum seconds for a request of a command."""


def launcher_directory() -> Path:
    """Return the directory of this user's launcher."""
    # Not in XDG_RUNTIME_DIR, which may be another user's, and is removed when its user logs out.
    base = os.environ.get(VARIABLE)
    if not base and os.geteuid() == 0:
        base = "/run/fumehood"
    elif not base:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        base = f"{state}/fumehood"
    return Path(base).expanduser().absolute() / f"launcher-{VERSION}"


def ask_launcher(
    directory: Path, request: JsonObject, descriptors: list[int], deadline_s: float
) -> JsonObject:
    """Send a request to the launcher in `directory`, and return its answer. If no launcher runs,
    start one. This function blocks.

    Raises:
        OSError: the launcher cannot be started or reached, or does not answer in time.
    """
    body = json.dumps(request).encode()
    if len(body) > MAX_BYTES:
        raise OSError("the request is too long")
    # If the launcher is killed with this request, the next one knows whether it was carried out,
    # and refuses to do it a second time. A process that was about to become a sandbox can hold the
    # socket of the killed launcher for a moment.
    for pause in RESET_PAUSES_S:
        with suppress(ConnectionResetError, BrokenPipeError):
            return _exchange(directory, body, descriptors, deadline_s)
        time.sleep(pause)
    return _exchange(directory, body, descriptors, deadline_s)


def _exchange(
    directory: Path, body: bytes, descriptors: list[int], deadline_s: float
) -> JsonObject:
    with _connected(directory) as connection:
        connection.settimeout(deadline_s)
        socket.send_fds(connection, [body], descriptors)
        said = connection.recv(ANSWER_BYTES)
    if not said:
        raise ConnectionResetError("the launcher has ended")
    try:
        answer: JsonObject = json.loads(said)
    except ValueError:
        raise OSError("the answer is incomplete") from None
    return answer


def _connected(directory: Path) -> socket.socket:
    if os.geteuid() != 0:  # the engine's own directory, which nobody else may enter
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("another user can change the launcher's directory")
    with suppress(ConnectionRefusedError, FileNotFoundError):
        return _connect(directory)
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        # Another process may have started the one that will serve, or it may have ended since.
        _start(directory)
        with suppress(ConnectionRefusedError, FileNotFoundError):
            return _connect(directory)
        time.sleep(START_PAUSE_S)
    return _connect(directory)


def _connect(directory: Path) -> socket.socket:
    opened = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(START_S)
        connection.connect(f"/proc/self/fd/{opened}/socket")  # the directory's path may be too long
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise PermissionError("the launcher is another user's")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(opened)
    return connection


def _start(directory: Path) -> None:
    """Start a launcher, and wait until it or another one serves the socket."""
    package = Path(__file__).parents[2]
    config = {"directory": str(directory), "idle_s": IDLE_S, "import_paths": [str(package)]}
    program = Path(__file__).with_name("launcher.py")
    command = [sys.executable, "-I", "-S", "-B", str(program), json.dumps(config)]
    with (directory / "log").open("ab") as log, _as_os_error():
        ended = subprocess.run(  # noqa: S603 - fixed words and our own paths
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            cwd="/", env={}, timeout=START_S, check=False,
        )  # fmt: skip
    if ended.returncode != 0:
        last = (directory / "log").read_bytes()[-LAST_WORDS_BYTES:].decode("utf-8", "replace")
        raise OSError(f"the launcher did not start: {last.strip().rpartition(chr(10))[2]}")


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except subprocess.TimeoutExpired:
        raise OSError("the launcher did not start in time") from None


def sandboxes_of(directory: Path) -> list[JsonObject]:
    """Return the sandboxes of the launcher in `directory`. If no launcher runs, return none."""
    try:
        with _connect(directory) as connection:
            connection.settimeout(REQUEST_S)
            connection.send(json.dumps({"do": "list"}).encode())
            found: list[JsonObject] = json.loads(connection.recv(ANSWER_BYTES))["sandboxes"]
            return found
    except (ConnectionRefusedError, FileNotFoundError):
        return []


@dataclass(frozen=True, slots=True)
class Ended:
    """How a build step has ended: its exit code, and the end of its output. A step that
    took too long has no exit code.
    """

    exit_code: int | None
    output: str


def run_step(directory: Path, plan: JsonObject, run_s: float) -> Ended:
    """Run the command of a plan in a sandbox of the launcher in `directory`, for at most `run_s`
    seconds.

    Raises:
        OSError: the launcher cannot be started or reached, or did not start the sandbox.
    """
    readable, writable = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(readable, "rb") as output, Path(os.devnull).open("rb") as null:
        try:
            descriptors = [null.fileno(), writable, writable]
            _ask(directory, {"do": "launch", "plan": plan}, descriptors)
        finally:
            os.close(writable)
        try:
            end = time.monotonic() + run_s
            said = b""
            os.set_blocking(output.fileno(), False)
            while time.monotonic() < end:
                with suppress(BlockingIOError):
                    said = (said + (output.read(STEP_OUTPUT_BYTES) or b""))[-STEP_OUTPUT_BYTES:]
                state = _ask(directory, {"do": "state", "name": plan["name"]})
                if not state["is_running"]:
                    said += output.read(STEP_OUTPUT_BYTES) or b""
                    return Ended(int(state["exit_code"]), said.decode("utf-8", "replace"))
                time.sleep(STEP_PAUSE_S)
            return Ended(None, "it took too long")
        finally:
            remove_sandbox(directory, plan["name"])


def remove_sandbox(directory: Path, name: str) -> None:
    """Kill and remove a sandbox. Do nothing if it does not exist. Raises OSError."""
    _ask(directory, {"do": "remove", "name": name})


def _ask(directory: Path, request: JsonObject, descriptors: list[int] | None = None) -> JsonObject:
    answer = ask_launcher(directory, request, descriptors or [], REQUEST_S)
    if "error" in answer:
        raise OSError(answer["error"])
    return answer
