"""The warden of one sandbox on a host that gives no namespaces.

Host side, a process of its own with one thread, standard library only. It starts the guest and
outlives the engine, so that a session does. All processes of the sandbox have a system-call filter
that sends some calls to the warden first. Landlock and the guest's own filter cannot decide about
these calls:

* a new process or thread: the warden counts them, and refuses those above the limit;
* a signal: only to processes of this sandbox's programs;
* a change of a file's mode or times: only below the two writable directories. The warden makes the
  change itself, because a program could change the path after it was checked.

Invariants: the warden lets a call continue only if all that decides about it is in registers; it
never waits for a program; when the guest has ended, it kills every process with the sandbox's mark,
and notes how the guest has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import selectors
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:] = [*json.loads(sys.argv[1])["import_paths"], *sys.path]

from fumehood.guest.core import children, kernel, seccomp
from fumehood.guest.core.marks import mark_of, marked
from fumehood.guest.core.pipes import held
from fumehood.guest.core.syscalls import architecture_of, own_number

RECORD, ENDED, LOG = "warden.json", "ended.json", "log"
"""Files of a sandbox's directory: the warden's process, which is written before the guest starts,
how the guest has ended, and the warden's faults.
"""

WRITABLE = ("workspace", "tmp")
COUNTERS = "counters"
"""The directory with the counters that the guest reads, in the form of control groups."""

GATE_FD = 3
"""The guest's descriptor of the socket to the warden."""

CLOSE, OPEN = b"C", b"O"
"""The guest's orders: hold back new processes of programs, and let them continue. *Source*:
`guest/container/gate.py`.
"""

VISIBLE_S = 0.01
"""Seconds after which a new process that was allowed is visible, unless its parent has not run."""

RETRY_S = 0.005
"""Seconds until a new process is decided about again, if others are still on their way."""

KILL_PAUSE_S = 0.001

PATH_BYTES = 4096
PAGE_BYTES = 4096

_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_NOTIFY = (0x06, 0, 0, 0x7FC00000)
_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
_CONTINUE = 1
"""*Source*: <linux/seccomp.h>."""

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")

_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = -100, 0x100, 0x1000
_RESOLVE = 0x02 | 0x08
"""RESOLVE_NO_MAGICLINKS and RESOLVE_BENEATH. *Source*: <linux/openat2.h>."""

_OWN_DESCRIPTOR = re.compile(r"/(?:proc/self|dev)/fd/(\d+)")
"""A path that means a descriptor of the process that uses it."""

_OPENAT2, _UTIMENSAT = own_number("openat2"), own_number("utimensat")

_libc = ctypes.CDLL(None, use_errno=True)


class Call(NamedTuple):
    """A system call that waits for the warden's decision: its id, the thread that makes it, and its
    arguments.
    """

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


class Refused(Exception):
    """The call fails with the error number `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.code = code


class Postponed(Exception):
    """The call is decided about later."""


class Warden:
    """The warden of the guest with the process id `guest`. Calls arrive on `listener`, and orders
    of the guest on `gate`. `folder` is the sandbox's directory, `mark` its mark, and `processes`
    the maximum number of processes and threads of its programs.
    """

    def __init__(
        self, guest: int, listener: int, gate: socket.socket, config: dict[str, Any]
    ) -> None:
        self._guest = guest
        self._listener = listener
        self._gate = gate
        self._folder: str = config["folder"]
        self._mark: int = config["mark"]
        self._most: int = config["processes"]
        self._roots = {
            path: os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for path in (f"{self._folder}/{name}" for name in WRITABLE)
        }
        self._is_closed = False
        self._postponed: list[Call] = []
        self._at_most = 1
        """An upper bound of the number of processes and threads of programs."""
        self._begun: dict[int, tuple[float, int]] = {}
        """Thread whose new process was allowed → when, and its CPU time then."""
        self._refused = 0
        self._counter = os.open(f"{self._folder}/{COUNTERS}/pids.events", os.O_WRONLY)
        self._handlers = _by_number(
            {
                **dict.fromkeys(("clone", "fork", "vfork"), self._new_process),
                "kill": self._kill, "tgkill": self._thread_kill,
                "chmod": self._chmod, "fchmod": self._fchmod, "fchmodat": self._fchmodat,
                "utime": self._utime, "utimes": self._utimes, "utimensat": self._utimensat,
            }
        )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        self._status = 0

    def serve(self) -> int:
        """Decide about calls until the guest has ended. Return its status, as `wait` does."""
        wakeup = children.watch()
        has_ended = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_notification)
        self._selector.register(self._gate, selectors.EVENT_READ, self._on_order)
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: children.drain(wakeup))
        while not has_ended:
            waits = self._postponed and not self._is_closed
            for key, _ in self._selector.select(RETRY_S if waits else None):
                key.data()
            if waits or not self._is_closed:
                again, self._postponed = self._postponed, []
                for call in again:
                    self._decide(call)
            for ended in children.reap():
                if ended.pid == self._guest:
                    has_ended, self._status = True, ended.status
        return self._status

    # -- calls -------------------------------------------------------------------

    def _on_notification(self) -> None:
        data = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, data)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):  # the process has ended
                self._selector.unregister(self._listener)
            return
        identity, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(data)
        self._decide(Call(identity, thread, number, tuple(arguments)))

    def _decide(self, call: Call) -> None:
        try:
            value = self._handlers[call.number](call)
        except Postponed:
            self._postponed.append(call)
        except Refused as refused:
            self._answer(call, error=refused.code)
        except OSError as error:
            self._answer(call, error=error.errno or errno.EPERM)
        except Exception:
            traceback.print_exc()
            self._answer(call, error=errno.EPERM)
        else:
            if value is None:
                self._answer(call, flags=_CONTINUE)
            else:
                self._answer(call)

    def _answer(self, call: Call, *, error: int = 0, flags: int = 0) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(call.id, 0, -error, flags))

    def _require_waiting(self, call: Call) -> None:
        """Check that the call still waits, so that its thread is the one that was looked at."""
        fcntl.ioctl(self._listener, _IS_VALID, struct.pack("=Q", call.id))

    def _is_guests(self, call: Call) -> bool:
        """Return whether a process of the guest makes the call. Then it is not decided about."""
        return mark_of(call.thread) == self._mark

    # -- processes ---------------------------------------------------------------

    def _on_order(self) -> None:
        order = self._gate.recv(1)
        if not order:  # the guest has ended
            self._selector.unregister(self._gate)
            return
        self._is_closed = order == CLOSE
        with contextlib.suppress(OSError):
            self._gate.send(order)

    def _new_process(self, call: Call) -> None:
        if self._is_guests(call):
            return
        if self._is_closed:
            raise Postponed
        if self._at_most >= self._most:
            self._count()
            if self._at_most >= self._most:
                if self._begun:
                    raise Postponed
                self._refused += 1
                os.pwrite(self._counter, b"max %d\n" % self._refused, 0)
                raise Refused(errno.EAGAIN)
        self._at_most += 1
        self._begun[call.thread] = time.monotonic(), _cpu_ns(call.thread)

    def _count(self) -> None:
        """Count the processes and threads of the programs, with those that were allowed and may not
        exist yet.
        """
        now = time.monotonic()
        for thread, (since, cpu_ns) in list(self._begun.items()):
            # Its parent has run since then, or is gone.
            if now - since > VISIBLE_S and _cpu_ns(thread) != cpu_ns:
                del self._begun[thread]
        found = (_threads_of(pid) for pid in marked(self._mark) if mark_of(pid) != self._mark)
        self._at_most = sum(found) + len(self._begun)

    # -- signals -----------------------------------------------------------------

    def _kill(self, call: Call) -> int | None:
        target, number = _signed(call.arguments[0]), _signed(call.arguments[1])
        process = _process_of(call.thread)
        if target == process or self._is_guests(call):
            return None
        if target > 0:
            wanted = [target]
        else:
            group = os.getpgid(process) if target == 0 else -target
            wanted = [pid for pid in self._programs() if target == -1 or _is_in(pid, group)]
            if target == -1:
                wanted = [pid for pid in wanted if pid != process]
        self._require_waiting(call)
        sent = [self._send(pid, number) for pid in wanted]
        if not any(sent):
            raise Refused(errno.ESRCH if not sent or not _exists(wanted) else errno.EPERM)
        return 0

    def _thread_kill(self, call: Call) -> int | None:
        if self._is_guests(call) or _signed(call.arguments[0]) == _process_of(call.thread):
            return None
        raise Refused(errno.EPERM)

    def _programs(self) -> list[int]:
        return [pid for pid in marked(self._mark) if mark_of(pid) != self._mark]

    def _send(self, pid: int, number: int) -> bool:
        """Send a signal to a process, if it is one of the sandbox's programs. Return whether."""
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return False
        with held(process):
            if mark_of(pid) != self._mark - 1:
                return False
            try:
                signal.pidfd_send_signal(process, number)
            except ValueError:
                raise Refused(errno.EINVAL) from None
            return True

    # -- files -------------------------------------------------------------------

    def _chmod(self, call: Call) -> int | None:
        return self._change_mode(call, _AT_FDCWD, call.arguments[0], call.arguments[1])

    def _fchmodat(self, call: Call) -> int | None:
        directory, path, mode = call.arguments[:3]
        return self._change_mode(call, _signed(directory), path, mode)

    def _fchmod(self, call: Call) -> int | None:
        return self._change_mode(call, _signed(call.arguments[0]), 0, call.arguments[1])

    def _change_mode(self, call: Call, directory: int, path: int, mode: int) -> int | None:
        if self._is_guests(call):
            return None
        with self._file_of(call, directory, path, follow=True) as (file, _):
            os.chmod(f"/proc/self/fd/{file}", mode & 0o1777)
        return 0

    def _utime(self, call: Call) -> int | None:
        times = _read(call.thread, call.arguments[1], 16)
        accessed, modified = struct.unpack("=2q", times) if times else (0, 0)
        given = times and struct.pack("=4q", accessed, 0, modified, 0)
        return self._change_times(call, _AT_FDCWD, call.arguments[0], given)

    def _utimes(self, call: Call) -> int | None:
        times = _read(call.thread, call.arguments[1], 32)
        given = times and struct.pack("=4q", *_thousandfold(struct.unpack("=4q", times)))
        return self._change_times(call, _AT_FDCWD, call.arguments[0], given)

    def _utimensat(self, call: Call) -> int | None:
        directory, path, times, flags = call.arguments[:4]
        given = _read(call.thread, times, 32)
        follow = not flags & _AT_SYMLINK_NOFOLLOW
        return self._change_times(call, _signed(directory), path, given, follow=follow)

    def _change_times(
        self, call: Call, directory: int, path: int, times: bytes, *, follow: bool = True
    ) -> int | None:
        if self._is_guests(call):
            return None
        with self._file_of(call, directory, path, follow=follow) as (file, is_link):
            name, flags = (b"", _AT_EMPTY_PATH) if is_link else (b"/proc/self/fd/%d" % file, 0)
            at = file if is_link else _AT_FDCWD
            if _libc.syscall(_UTIMENSAT, at, name, times or None, flags) != 0:
                raise Refused(ctypes.get_errno())
        return 0

    @contextlib.contextmanager
    def _file_of(
        self, call: Call, directory: int, path: int, *, follow: bool
    ) -> Iterator[tuple[int, bool]]:
        """Open the file that a call names by the descriptor of a directory and the address of a
        path. If the address is 0, the descriptor is that of the file. Yield a descriptor without
        access, and whether the file is a link.

        Raises:
            Refused: it is not below a writable directory.
        """
        text = _text(call.thread, path) if path else ""
        if path and (named := _OWN_DESCRIPTOR.fullmatch(text)):
            directory, path, text = int(named[1]), 0, ""
        name = "cwd" if directory == _AT_FDCWD else f"fd/{directory}"
        if path and text.startswith("/"):
            name = "cwd"  # its own root directory is nobody's
        with held(_open_path(f"/proc/{call.thread}/{name}")) as base:
            self._require_waiting(call)
            place = os.readlink(f"/proc/self/fd/{base}")
            whole = os.path.join(place, text)
            root = next((one for one in self._roots if f"{whole}/".startswith(f"{one}/")), None)
            if root is None:
                raise Refused(errno.EPERM)
            if not path:
                yield base, False
                return
            rest = whole[len(root) + 1 :] or "."
            with held(_open_beneath(self._roots[root], rest, follow=follow)) as file:
                yield file, stat.S_ISLNK(os.fstat(file).st_mode)


def _by_number(handlers: dict[str, Callable[[Call], int | None]]) -> dict[int, Any]:
    numbers = architecture_of()[1]
    return {numbers[name]: handler for name, handler in handlers.items() if name in numbers}


def _open_path(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _open_beneath(root: int, path: str, *, follow: bool) -> int:
    """Open a path without leaving the directory `root`, and without any access to the file."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    how = struct.pack("=3Q", flags, 0, _RESOLVE)
    found = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how))
    if found < 0:
        code = ctypes.get_errno()
        raise Refused(errno.EPERM if code == errno.EXDEV else code)
    return int(found)


def _read(thread: int, address: int, size: int) -> bytes:
    """Read memory of a process. Return nothing if the address is 0. Raises OSError."""
    if not address:
        return b""
    with held(os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)) as memory:
        found = os.pread(memory, size, address)
    if len(found) < size:
        raise Refused(errno.EFAULT)
    return found


def _text(thread: int, address: int) -> str:
    """Read a text that ends with a zero byte from the memory of a process. Raises OSError."""
    found = b""
    with held(os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)) as memory:
        while len(found) < PATH_BYTES:
            at = address + len(found)
            piece = os.pread(memory, PAGE_BYTES - at % PAGE_BYTES, at)  # the next page may lack
            text, ends, _ = piece.partition(b"\0")
            found += text
            if ends:
                return os.fsdecode(found)
            if not piece:
                raise Refused(errno.EFAULT)
    raise Refused(errno.ENAMETOOLONG)


def _signed(argument: int) -> int:
    """Return an argument as a signed number of 32 bits."""
    return (argument & 0xFFFFFFFF) - ((argument & 0x80000000) << 1)


def _thousandfold(times: tuple[int, ...]) -> list[int]:
    """Return pairs of seconds and microseconds as pairs of seconds and nanoseconds."""
    return [times[0], times[1] * 1000, times[2], times[3] * 1000]


def _process_of(thread: int) -> int:
    shown = children.field(children.status(thread), b"Tgid")
    if shown is None:
        raise Refused(errno.ESRCH)
    return int(shown)


def _threads_of(pid: int) -> int:
    return int(children.field(children.status(pid), b"Threads") or 0)


def _cpu_ns(thread: int) -> int:
    """Return the CPU time in nanoseconds that a thread has used, or -1 if it is gone."""
    try:
        with open(f"/proc/{thread}/schedstat", encoding="utf-8") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError):
        return -1


def _is_in(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except OSError:
        return False


def _exists(pids: list[int]) -> bool:
    return any(os.path.exists(f"/proc/{pid}") for pid in pids)


NOTIFIED = (
    "chmod", "clone", "fchmod", "fchmodat", "fork", "kill", "tgkill", "utime", "utimensat",
    "utimes", "vfork",
)  # fmt: skip
"""The system calls that the warden decides about."""


def build_outer_filter(machine: str | None = None) -> bytes:
    """Return the filter that sends `NOTIFIED` to the warden and allows everything else."""
    return seccomp.build(machine, {name: [_NOTIFY] for name in NOTIFIED}, seccomp.allow())


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install(program: bytes) -> int:
    """Install the outer filter on this process, and return the descriptor on which its calls
    arrive.
    """
    header: Any = ctypes.byref(_Program(len(program) // 8, program))
    number = own_number("seccomp")
    try:  # so that signals do not interrupt the calls
        flags = _NEW_LISTENER | _WAIT_KILLABLE
        return kernel.syscall(number, seccomp.SET_MODE_FILTER, flags, header)
    except OSError:  # Linux before 5.19
        return kernel.syscall(number, seccomp.SET_MODE_FILTER, _NEW_LISTENER, header)


def kill_marked(mark: int, spared: int = 0) -> None:
    """Kill all processes with this mark, except the process `spared`, until none is left."""
    was_clean = False
    while True:
        found = [pid for pid in marked(mark) if pid != spared and not _is_zombie(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found and was_clean:
            return
        was_clean = not found
        time.sleep(KILL_PAUSE_S)


def _is_zombie(pid: int) -> bool:
    return (children.field(children.status(pid), b"State") or b"X")[:1] in b"ZX"


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _start_guest(config: dict[str, Any], gate: socket.socket) -> None:
    """Become the guest. `gate` is its socket to the warden."""
    listener = _install(build_outer_filter())
    socket.send_fds(gate, [CLOSE], [listener])
    os.dup2(gate.fileno(), GATE_FD)
    os.closerange(GATE_FD + 1, 1024)
    command = config["command"]
    os.execve(command[0], command, config["env"])


def _write(path: str, content: dict[str, Any]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.rename(f"{path}.new", path)


def began(pid: int) -> int:
    """Return when a process began, in clock ticks since the host's start, or 0 if it is gone.
    *Source*: proc_pid_stat(5), starttime.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def run(config: dict[str, Any]) -> None:
    """Start the guest, and serve it until it has ended."""
    folder, mark = config["folder"], config["mark"]
    if config["user"] is not None:
        _become(config["user"])
    os.chdir(folder)
    for name in (*WRITABLE, COUNTERS):
        os.mkdir(name, 0o700)
    for name, text in (("pids.max", f"{config['processes']}\n"), ("pids.events", "max 0\n")):
        with open(f"{COUNTERS}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    for name, value in config["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = os.getpid()
    _write(RECORD, {"pid": own, "began": began(own)})
    ours, theirs = socket.socketpair()
    guest = os.fork()
    if guest == 0:
        try:
            _start_guest(config, theirs)
        except BaseException as fault:
            os.write(2, f"warden: {type(fault).__name__}: {fault}\n".encode()[:400])
        finally:
            os._exit(1)
    theirs.close()
    try:
        _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    except (OSError, ValueError):
        _end(config, os.waitpid(guest, 0)[1])
        return
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, own in enumerate((null, null, log)):  # until now they are the guest's
        os.dup2(own, descriptor)
    _end(config, Warden(guest, listener, ours, config).serve())


def _end(config: dict[str, Any], status: int) -> None:
    kill_marked(config["mark"], spared=os.getpid())
    for _ in children.reap():
        pass
    code = os.waitstatus_to_exitcode(status)
    _write(ENDED, {"exit_code": code if code >= 0 else 128 - code})


def main() -> None:
    """Start a warden in a new process, and end when it runs."""
    config = json.loads(sys.argv[1])
    os.umask(0o077)
    if os.fork():
        os._exit(0)  # the engine waits for this, and the warden is nobody's child
    os.setsid()
    run(config)


if __name__ == "__main__":
    main()
