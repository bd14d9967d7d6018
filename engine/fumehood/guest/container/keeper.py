"""A keeper: the parent of one registered process, which runs beside the calls of a session.

Guest side, forked by the supervisor, one keeper for each registered process. A keeper runs as root,
so no program can touch it. It is a subreaper, so orphans of the registered process become children
of the keeper, and the operating system always knows which processes belong to the registered
process (see `trees`). The keeper reads the process's output into a ring, writes its input, and
kills it on request. On gVisor, only the container's first process can be a subreaper. So orphans of
a registered process have no keeper there, and are killed after the next call.

Invariants: a keeper ends when no process is left below it; it reports only what the operating
system reports; it keeps no more than `RING_BYTES` of output and `MAX_WAITING_BYTES` of input.
"""

from __future__ import annotations

import base64
import codecs
import functools
import gc
import math
import os
import resource
import selectors
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from fumehood.guest.container import processes, trees
from fumehood.guest.container.child import ENVIRONMENT, HOME, NICENESS, read_image
from fumehood.guest.container.filter import build_container_filter
from fumehood.guest.container.places import MARK, WORKSPACE
from fumehood.guest.container.processes import REQUEST_FAILED, USER_ID, become_user
from fumehood.guest.container.request import SetUpFailed, surround
from fumehood.guest.core import children, kernel, seccomp
from fumehood.guest.core.pipes import CHUNK_BYTES, write_all
from fumehood.guest.languages import shell
from fumehood.protocol import framing

MAX_WAITING_BYTES = 1 << 20
"""Maximum number of bytes of input that wait because the registered process has not read them."""

KEEPER_NICENESS = NICENESS + 5
"""Scheduling priority (niceness) of keepers. Their priority is lower than that of programs, because
a registered process may print for ever.
"""

FAILED = b"F"
"""First byte of the report of a child that could not become the registered program."""

the_filter = functools.cache(functools.partial(build_container_filter, is_shared=MARK is not None))
"""Returns the system-call filter of programs. Building it takes a while, so it is built only
once.
"""


def run_keeper(
    supervisor: socket.socket, ring: Ring, config: dict[str, Any], request: dict[str, Any]
) -> NoReturn:
    """Run a keeper until no process is left below it, and then exit.

    `supervisor` is the socket to the supervisor. `config` contains the resource limits, and
    `request` describes the process to start. The keeper writes the output of this process to
    `ring`.
    """
    status = 1
    try:
        _leave_the_supervisor(supervisor, ring)
        Keeper(supervisor, ring, gets_orphans=_become_subreaper()).serve(config, request)
        status = 0
    except BaseException as fault:
        os.write(2, f"keeper: {type(fault).__name__}: {fault}\n".encode()[:400])
    finally:
        os._exit(status)


def _leave_the_supervisor(supervisor: socket.socket, ring: Ring) -> None:
    """Close all descriptors that this process has inherited from the supervisor, except standard
    error, `supervisor` and `ring`. Above all, this closes the channel to the host.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    kept = sorted((2, supervisor.fileno(), ring.descriptor))
    for low, high in zip(kept, [*kept[1:], descriptor_limit()], strict=True):
        os.closerange(low + 1, high)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    gc.disable()  # it would copy memory pages that are shared with the supervisor


def _become_subreaper() -> bool:
    """Become the parent of all orphans below this process. Return False if the operating system
    refuses this.
    """
    try:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    except OSError:  # gVisor permits this only to the first process
        return False
    return True


def descriptor_limit() -> int:
    """Return the limit for descriptor numbers: one more than the highest possible."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Keeper:
    """The event loop of a keeper, and the data that it uses."""

    def __init__(self, supervisor: socket.socket, ring: Ring, *, gets_orphans: bool) -> None:
        self._gets_orphans = gets_orphans
        self._supervisor = supervisor
        self._ring = ring
        self._selector = selectors.DefaultSelector()
        self._decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
        self._wakeup = children.watch()
        self._first = 0
        """The process id of the registered process itself, without its descendants."""
        self._output = -1
        self._input = -1
        self._waiting = bytearray()
        self._is_closing = False
        """Whether the process's standard input must be closed once `_waiting` is written."""
        self._kill_at = math.inf

    def serve(self, config: dict[str, Any], request: dict[str, Any]) -> None:
        """Start the registered process that `request` describes. Then serve the supervisor until no
        process is left below the keeper.
        """
        fault = self._start(config, request)
        if fault is not None:
            self._tell({"failed": fault})
            return
        # Not earlier: the child would inherit this priority, and could not raise it again.
        os.setpriority(os.PRIO_PROCESS, 0, KEEPER_NICENESS)
        self._tell({"started": True, "gets_orphans": self._gets_orphans})
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._on_supervisor)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_sigchld)
        self._selector.register(self._output, selectors.EVENT_READ, self._on_output)
        while self._has_children():
            left_s = None if self._kill_at == math.inf else self._kill_at - time.monotonic()
            for key, _ in self._selector.select(left_s):
                key.data()
            if time.monotonic() >= self._kill_at:
                trees.end_below(os.getpid(), self._reap)
        self._read_the_rest()
        self._tell({"over": True})

    # -- the process -----------------------------------------------------------------------

    def _start(self, config: dict[str, Any], request: dict[str, Any]) -> str | None:
        """Start the registered process that `request` describes. Return None, or the reason why
        this failed.
        """
        with kernel.files_made_as(USER_ID):  # so that the process can open /dev/stdout
            stdin_read, self._input = os.pipe()
            self._output, stdout_write = os.pipe()
        report_read, report_write = os.pipe()
        self._first = processes.fork()
        if self._first == 0:
            _become_program(config, request, stdin_read, stdout_write, report_write)
        for descriptor in (stdin_read, stdout_write, report_write):
            os.close(descriptor)
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        report = os.read(report_read, CHUNK_BYTES)  # returns b"" when the program starts
        os.close(report_read)
        return report[1:].decode("utf-8", "replace") if report.startswith(FAILED) else None

    def _on_sigchld(self) -> None:
        children.drain(self._wakeup)
        self._reap()

    def _reap(self) -> None:
        for ended in children.reap():
            if ended.pid == self._first:
                exit_code, signal_number = children.decode_status(ended.status)
                self._tell({"first": {"exit_code": exit_code, "signal": signal_number}})

    @staticmethod
    def _has_children() -> bool:
        """Whether a process is left below the keeper. Orphans become the keeper's children."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _stop(self, grace_s: float) -> None:
        """Send SIGTERM to all processes below the keeper. Processes that are left after `grace_s`
        seconds are killed.
        """
        if self._kill_at == math.inf:
            for pid in trees.below(os.getpid()):
                for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process must continue
                    with suppress(ProcessLookupError):
                        processes.send(pid, number)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    # -- its streams -----------------------------------------------------------------------

    def _on_output(self) -> None:
        if not self._read():
            self._selector.unregister(self._output)

    def _read(self) -> bool:
        """Read output of the registered process that is available, and add it to the ring. Return
        False if all writers have closed the pipe.
        """
        try:
            data = os.read(self._output, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if data:
            self._ring.append(data)
        return bool(data)

    def _read_the_rest(self) -> None:
        """Read the remaining output of the registered process, which is dead. At most `RING_BYTES`
        bytes are read.
        """
        # Other processes may have the same pipe open and still write to it.
        for _ in range(RING_BYTES // CHUNK_BYTES):
            if kernel.unread_bytes(self._output) == 0 or not self._read():
                return

    def _write(self, data: bytes, *, close: bool) -> str | None:
        """Accept `data` for the standard input of the registered process. It is written as soon as
        the pipe has room. If `close` is True, the input is closed afterwards.

        Return None if the data was accepted, otherwise the reason why not.
        """
        if self._input < 0 or self._is_closing:
            return "Its standard input is closed."
        if len(self._waiting) + len(data) > MAX_WAITING_BYTES:
            return f"It has not read {len(self._waiting)} bytes of its standard input yet."
        self._waiting += data
        self._is_closing = close
        self._flush()
        return None

    def _flush(self) -> None:
        is_over = False
        try:
            while self._waiting:
                del self._waiting[: os.write(self._input, self._waiting[:CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:  # all readers have closed the pipe
            is_over = True
        is_watched = self._input in self._selector.get_map()
        if self._waiting and not is_over:
            if not is_watched:
                self._selector.register(self._input, selectors.EVENT_WRITE, self._flush)
            return
        if is_watched:
            self._selector.unregister(self._input)
        if is_over or self._is_closing:
            os.close(self._input)
            self._input = -1
            self._waiting.clear()

    # -- the supervisor --------------------------------------------------------------------

    def _on_supervisor(self) -> None:
        data = self._supervisor.recv(CHUNK_BYTES)
        if not data:  # the supervisor is gone, and so is the container
            os._exit(0)
        for order in self._decoder.feed(data):
            if order["do"] == "stop":
                self._stop(order["grace_s"])
            else:
                fault = self._write(base64.b64decode(order["data"]), close=order["close"])
                self._tell({"id": order["id"], "fault": fault})

    def _tell(self, message: dict[str, Any]) -> None:
        write_all(self._supervisor.fileno(), framing.encode(message))


def _become_program(
    config: dict[str, Any], request: dict[str, Any], stdin: int, stdout: int, report: int
) -> NoReturn:
    """Replace this process by the registered program that `request` describes. If this fails, write
    the reason to the descriptor `report`, and exit.

    `stdin` and `stdout` are the descriptors that become the program's standard input and output.
    `config` contains the resource limits.
    """
    try:
        _seal(config, stdin, stdout, report)
        surround({"env": request.get("env"), "working_directory": request.get("working_directory")})
        if request.get("argv"):
            shell.execute(request["argv"][0], request["argv"])
        shell.execute(shell.BASH, *shell.arguments_of_bash(request["command"]))
    except SetUpFailed as fault:
        why = f"{str(fault)[:1].upper()}{str(fault)[1:]}."
    except FileNotFoundError:
        why = "It cannot be started: there is no such program."
    except OSError as error:
        why = f"It cannot be started: {error.strerror}."
    except BaseException as fault:
        why = f"It cannot be started: {type(fault).__name__}."
    with suppress(OSError):
        write_all(report, FAILED + why.encode("utf-8", "replace"))
    os._exit(REQUEST_FAILED)


def _seal(config: dict[str, Any], stdin: int, stdout: int, report: int) -> None:
    """Give this process the streams, limits, system-call filter and user of a program. Raises
    OSError if a step fails.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.closerange(3, report)
    os.closerange(report + 1, descriptor_limit())
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(HOME | ENVIRONMENT | read_image().environment)
    os.chdir(WORKSPACE)
    for which, value in config["limits"]:
        resource.setrlimit(which, (value, value))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(the_filter(is_watched=config["is_watched"]))
    kernel.volunteer_for_oom()
    # This process has a copy of the supervisor's memory. After the change of user it cannot be
    # dumped until it becomes the program.
    become_user()


RING_BYTES = 1 << 20
"""Number of bytes of a process's output that are kept. Earlier bytes are overwritten."""

_POSITION = struct.Struct("!Q")
_WRITTEN, _ANNOUNCED = RING_BYTES, RING_BYTES + _POSITION.size
"""Offsets of two counters in the ring's file. The first is the total number of bytes written. The
second is the value that this number will have after the current write.
"""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The values that the second and later bytes of a UTF-8 character can have."""


class Piece(NamedTuple):
    """A part of a registered process's output. `offset` is the number of the byte at which the next
    part begins.

    If requested bytes before this part were already overwritten, `skipped` is their number.
    """

    text: str
    offset: int
    skipped: int
    is_last: bool


class Ring:
    """The last `RING_BYTES` bytes that a registered process has printed.

    The bytes are in an anonymous file that the keeper writes and the supervisor reads, without
    exchanging messages. Invariant: `read` returns no bytes that were overwritten while it was
    reading.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("output", os.MFD_CLOEXEC)
        self._count = 0

    def append(self, data: bytes) -> None:
        """Add `data`, which must be shorter than `RING_BYTES`. Used by the keeper."""
        start = self._count % RING_BYTES
        self._count += len(data)
        self._set(_ANNOUNCED)
        room = RING_BYTES - start
        os.pwrite(self.descriptor, data[:room], start)
        if len(data) > room:
            os.pwrite(self.descriptor, data[room:], 0)
        self._set(_WRITTEN)

    def read(self, after: int, most_bytes: int, *, is_over: bool) -> Piece:
        """Return the output from the byte number `after` on, at most `most_bytes` bytes. If these
        bytes were overwritten, begin with the first byte that is still kept.

        If `is_over` is True, nothing more will be appended. A character is never split.
        """
        end = self._get(_WRITTEN)
        start = min(max(after, end - RING_BYTES, 0), end)
        data = self._copy(start, min(end - start, most_bytes))
        lost = min(max(0, self._get(_ANNOUNCED) - RING_BYTES - start), len(data))
        if start + lost > after:  # the first character may have begun before
            rest = data[lost : lost + 3]
            lost += len(rest) - len(rest.lstrip(_CONTINUATION))
        data = data[lost:]
        start += lost
        is_last = is_over and start + len(data) == end
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=is_last)
        offset = start + len(data) - len(decoder.getstate()[0])
        return Piece(text, offset, max(0, start - after), is_last)

    def close(self) -> None:
        """Close the ring's file."""
        os.close(self.descriptor)

    def _copy(self, start: int, count: int) -> bytes:
        place = start % RING_BYTES
        first = os.pread(self.descriptor, min(count, RING_BYTES - place), place)
        return first + os.pread(self.descriptor, count - len(first), 0)

    def _set(self, place: int) -> None:
        os.pwrite(self.descriptor, _POSITION.pack(self._count), place)

    def _get(self, place: int) -> int:
        return int.from_bytes(os.pread(self.descriptor, _POSITION.size, place), "big")
