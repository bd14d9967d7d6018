"""Starts one sandbox: its namespaces, mounts, privileges and limits, and then a command in it.

Host side, standard library only; used by the launcher, which has a single thread. Whatever needs a
right comes before the step that gives up the right, and the command comes last. Nothing of a caller
is mounted: only the image, new file systems, six devices, and the disk of a session. Invariant: if
a step fails, the command is not started, and no process and no mount is left.

The order is this. The launcher clones the mounts that it passes on. A process called the builder
joins the control group and enters new namespaces. The launcher maps the user ids of the new user
namespace, so that its root is an unprivileged user of the host. The builder then forks the first
process of the new PID namespace, and ends. The first process makes the mounts, drops its
capabilities, installs the filter of system calls and executes the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from fumehood.guest.core import kernel, seccomp

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x08000000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID
    | CLONE_NEWNET
)  # fmt: skip
"""All namespaces of a sandbox. *Source*: <linux/sched.h>."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_BIND, MS_REC = 1024, 4096, 16384
MS_PRIVATE, MS_SLAVE = 1 << 18, 1 << 19
MNT_DETACH = 2
"""Flags of mount(2) and umount2(2)."""

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
"""Attributes of mount_setattr(2)."""

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _AT_RECURSIVE, _AT_EMPTY_PATH, _MOVE_FROM_DESCRIPTOR = 1, 0x8000, 0x1000, 4
_AT_FDCWD = -100
"""The system calls for mounts, whose numbers are the same on all architectures, and their flags."""

_PIDFD_GETFD, _SIOCGSKNS, _NS_GET_USERNS = 438, 0x894C, 0xB701

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""The devices below /dev in a sandbox."""

SHARES_MEMORY = "zero"
"""The device whose maps are shared memory without a file. A sandbox whose memory is watched does
not have it, because such memory is not found.
"""

DEVICE_LINKS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
}  # fmt: skip

SMALL_BUFFERS = {
    "ipv4/tcp_rmem": "4096 65536 65536", "ipv4/tcp_wmem": "4096 65536 65536",
    "unix/max_dgram_qlen": "1",
}  # fmt: skip
"""Settings of the network of a sandbox whose memory is watched."""

PLACE = "/tmp"  # noqa: S108 - nothing is written there
"""Where the root of a sandbox is attached in the mount namespace of the sandbox. Every user of the
host can reach this directory, also the sandbox's root.
"""

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
"""Where the command of a starter is searched."""

START_S = 20.0
"""Maximum seconds for each step of a start. A busy host is slow."""

MESSAGE_BYTES = 2048
_PLAIN = MS_NOSUID | MS_NODEV | MS_NOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


class NotStarted(Exception):
    """A sandbox did not start. The message says which step failed."""


def clone_mount(path: str, attributes: int) -> int:
    """Return a descriptor of a copy of the mount at `path` and of those below it, with these
    attributes. The copy is not attached anywhere, so it disappears with the descriptor. What is
    mounted there later does not appear in it.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    tree = _syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags)
    wanted = struct.pack("=QQQQ", attributes, 0, MS_PRIVATE, 0)
    try:
        _syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, wanted, len(wanted))
    except OSError:
        os.close(tree)
        raise
    return tree


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    """Call mount(2). Raises OSError."""
    texts = (None if text is None else text.encode() for text in (source, target, kind))
    data = None if options is None else options.encode()
    source_, target_, kind_ = texts
    _checked(_libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), data), f"mount {target}")


def unmount(target: str) -> None:
    """Detach the mount at `target`. Raises OSError."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def enter(namespaces: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    _checked(_libc.unshare(namespaces), "unshare")


def join(process: int, namespaces: int) -> None:
    """Move this process into namespaces of the process with the descriptor `process`. Raises
    OSError.
    """
    _checked(_libc.setns(process, namespaces), "setns")


def join_netns_of_sockets(pid: int, process: int) -> None:
    """Move this process into the network namespace in which the first sockets of a process were
    made. `pid` is its id, and `process` a descriptor of it. It must belong to our user namespace,
    and be neither ours nor the one in which that process is. *Source*: pidfd_getfd(2), ioctl_ns(2).

    Raises:
        OSError: no such namespace is found.
    """
    known = {os.stat(f"/proc/{one}/ns/net").st_ino for one in ("self", pid)}
    user = os.stat("/proc/self/ns/user").st_ino
    for name in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            end = _syscall(_PIDFD_GETFD, process, name, 0)
            undo.callback(os.close, end)
            netns = fcntl.ioctl(end, _SIOCGSKNS)
            undo.callback(os.close, netns)
            owner = fcntl.ioctl(netns, _NS_GET_USERNS)
            undo.callback(os.close, owner)
            if os.fstat(netns).st_ino not in known and os.fstat(owner).st_ino == user:
                return join(netns, CLONE_NEWNET)
    raise OSError("the netns of a sandbox is not found")


def _syscall(number: int, *arguments: int | bytes) -> int:
    result = int(_libc.syscall(number, *arguments))
    _checked(result, f"system call {number}")
    return result


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def start(
    plan: dict[str, Any],
    trees: dict[str, int],
    streams: Sequence[int],
    join_group: Callable[[], None],
    on_first: Callable[[int], None],
) -> int:
    """Start a sandbox, and return the process id of its first process. Before this process does
    anything, `on_first` is called with its id.

    `trees` maps paths in the sandbox to descriptors of mounts. The first of them is `/`. `streams`
    are the descriptors of the command's standard streams. `join_group` moves the calling process
    into the sandbox's control group.

    Raises:
        NotStarted: a step failed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    builder = os.fork()
    if builder == 0:
        with _said_to(theirs):
            ours.close()
            _build(plan, trees, streams, join_group, theirs)
    theirs.close()
    ours.settimeout(START_S)
    first = 0
    try:
        with ours:
            _expect(ours, "apart")
            _map_ids(builder, plan["ids"])
            ours.send(b"mapped")
            first = int(_expect(ours, "first"))
            on_first(first)
            ours.send(b"go")
            said = ours.recv(MESSAGE_BYTES)  # the end of the stream: the command was executed
        if said:
            raise NotStarted(said.decode("utf-8", "replace"))
    except (OSError, ValueError, NotStarted) as error:
        for pid in (builder, first):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os.waitpid(builder, 0)
        if first:  # whose parent is now this process
            with contextlib.suppress(ChildProcessError):
                os.waitpid(first, 0)
        raise NotStarted(str(error)) from None
    os.waitpid(builder, 0)
    return first


def run_apart(
    command: Sequence[str],
    trees: dict[str, int],
    streams: Sequence[int],
    join_group: Callable[[], None],
    id_map: Sequence[Sequence[int]],
) -> int:
    """Run a command in a mount namespace of its own, and return its process id. It is the command
    of a starter (see the launcher).

    `trees` maps names below `PLACE` to descriptors of mounts, which are attached there. The command
    runs as root of a new user namespace with the ids `id_map`. If this is empty, it runs in the
    user namespace of this process.

    Raises:
        NotStarted: a step failed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        with _said_to(theirs):
            ours.close()
            os.setsid()
            join_group()
            enter(CLONE_NEWNS | (CLONE_NEWUSER if id_map else 0))
            theirs.send(b"apart")
            if theirs.recv(MESSAGE_BYTES) != b"mapped":
                os._exit(1)
            if id_map:
                os.setresgid(0, 0, 0)
                os.setgroups([])
                os.setresuid(0, 0, 0)
            mount("none", "/", None, MS_REC | MS_SLAVE)  # what the host unmounts disappears here
            mount("tmpfs", PLACE, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=16,mode=700")
            for name, tree in trees.items():
                path = f"{PLACE}/{name}"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                attach(tree, path)
            os.chdir("/")
            _use_streams(streams, theirs)
            _execute(command, {"PATH": PATH})
    theirs.close()
    ours.settimeout(START_S)
    try:
        with ours:
            _expect(ours, "apart")
            if id_map:
                _map_ids(pid, id_map)
            ours.send(b"mapped")
            said = ours.recv(MESSAGE_BYTES)  # the end of the stream: the command was executed
        if said:
            raise NotStarted(said.decode("utf-8", "replace"))
    except (OSError, ValueError, NotStarted) as error:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise NotStarted(str(error)) from None
    return pid


def _expect(source: socket.socket, word: str) -> str:
    """Receive a message that begins with `word`, and return the rest of it."""
    said = source.recv(MESSAGE_BYTES).decode("utf-8", "replace")
    if not said.startswith(word):
        raise NotStarted(said or "the process ended")
    return said.removeprefix(word)


def _map_ids(pid: int, ids: Sequence[Sequence[int]]) -> None:
    for kind in ("uid", "gid"):
        with open(f"/proc/{pid}/{kind}_map", "w", encoding="ascii") as file:
            file.write("".join(f"{inside} {outside} {count}\n" for inside, outside, count in ids))


@contextlib.contextmanager
def _said_to(told: socket.socket) -> Iterator[None]:
    """Run the block in a process that never returns from it. If the block fails, send the reason to
    `told`.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            told.send(f"{type(error).__name__}: {error}".encode()[:MESSAGE_BYTES])
    finally:
        os._exit(1)


def _build(
    plan: dict[str, Any],
    trees: dict[str, int],
    streams: Sequence[int],
    join_group: Callable[[], None],
    told: socket.socket,
) -> None:
    os.setsid()
    join_group()
    enter(NAMESPACES)
    told.send(b"apart")
    if told.recv(MESSAGE_BYTES) != b"mapped":
        return
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)
    pid = os.fork()
    if pid:
        told.send(f"first{pid}".encode())
        os._exit(0)
    if told.recv(MESSAGE_BYTES) == b"go":  # else nobody knows this process
        _become_first(plan, trees, streams, told)


def _become_first(
    plan: dict[str, Any],
    trees: dict[str, int],
    streams: Sequence[int],
    told: socket.socket,
) -> None:
    """Become the command in the sandbox. This process is the first of its PID namespace."""
    filter_ = bytes.fromhex(plan["filter"])
    if plan["is_watched"]:
        _limit_buffers()
    _mount_all(plan, trees)
    socket.sethostname("sandbox")
    _use_loopback()
    os.umask(0o022)
    os.chdir(plan["directory"])
    _use_streams(streams, told)
    for name, value in plan["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _drop(plan["capabilities"], plan["user"])
    seccomp.install(filter_)
    _execute(plan["command"], plan["env"])


def _use_streams(streams: Sequence[int], told: socket.socket) -> None:
    """Make the descriptors `streams` the standard streams of this process, and close all others
    except that of `told`, which gets the number 3.
    """
    kept = fcntl.fcntl(told.fileno(), fcntl.F_DUPFD_CLOEXEC, 3 + len(streams))
    for target, descriptor in enumerate([fcntl.fcntl(one, fcntl.F_DUPFD, 64) for one in streams]):
        os.dup2(descriptor, target)
    os.dup2(kept, 3, inheritable=False)
    os.closerange(4, 1 << 20)


def _execute(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Execute a command. If this fails, say so on the descriptor 3."""
    try:
        os.execvpe(command[0], [*command], environment)
    except OSError as error:
        os.write(3, f"{command[0]} cannot be executed: {error.strerror}".encode())
    os._exit(127)


def _mount_all(plan: dict[str, Any], trees: dict[str, int]) -> None:
    """Make the mounts of the sandbox below `PLACE`, and make this directory the root."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root, *others = trees.items()
    attach(root[1], PLACE)
    os.chdir(PLACE)
    mount("proc", "proc", "proc", _PLAIN)
    mount("sysfs", "sys", "sysfs", _PLAIN | MS_RDONLY)
    mount("tmpfs", "sys/fs/cgroup", "tmpfs", _PLAIN, "size=64k,nr_inodes=16,mode=755")
    for path in plan["cgroup_places"]:
        os.mkdir(f"sys/fs/cgroup/{path}")
    _mount_dev([path.rpartition("/")[2] for path in trees if path.startswith("/dev/")])
    for path, (size_mb, inodes, mode) in plan["tmpfs"].items():
        options = f"size={size_mb}m,nr_inodes={inodes},mode={mode}"
        mount("tmpfs", path[1:], "tmpfs", _PLAIN, options)
    for path, tree in others:
        attach(tree, path[1:])
    _restrict(plan["masked"], plan["read_only"])
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    unmount(".")  # the former root, which now lies above the new one
    os.chdir("/")


def _mount_dev(devices: Sequence[str]) -> None:
    """Mount an empty /dev with the places for devices."""
    mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755")
    for name in devices:
        os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"dev/{name}")
    options = "newinstance,ptmxmode=0666,mode=0620"
    mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)


def _restrict(masked: Sequence[str], read_only: Sequence[str]) -> None:
    """Make the paths `masked` empty, and the paths `read_only` read-only, as far as they exist.

    `/dev` and the directory of the cgroups become read-only in any case.
    """
    as_read_only = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC
    mount("none", "dev", None, as_read_only)
    mount("none", "sys/fs/cgroup", None, as_read_only | MS_NODEV)
    for path in (path[1:] for path in read_only if os.path.exists(path[1:])):
        mount(path, path, None, MS_BIND | MS_REC)
        mount("none", path, None, as_read_only | MS_NODEV)
    for path in (path[1:] for path in masked):
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", _PLAIN | MS_RDONLY, "size=0k,nr_inodes=1")
        elif os.path.exists(path):
            mount("dev/null", path, None, MS_BIND)


def attach(tree: int, target: str) -> None:
    """Attach the mount with the descriptor `tree` at `target`. Raises OSError."""
    _syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_FROM_DESCRIPTOR)


def _limit_buffers() -> None:
    """Keep the buffers of TCP connections from growing, and queues of Unix datagrams short. The
    operating system has these settings for each network namespace. *Source*: tcp(7), unix(7).
    """
    for name, value in SMALL_BUFFERS.items():
        with open(f"/proc/sys/net/{name}", "w", encoding="ascii") as file:
            file.write(value)


def _use_loopback() -> None:
    """Set the loopback interface up. *Source*: netdevice(7), SIOCSIFFLAGS, IFF_UP, IFF_RUNNING."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        fcntl.ioctl(end, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x40, b""))


def _drop(capabilities: Sequence[int], user: int) -> None:
    """Keep only these capabilities, and become the user `user`, if it is not root."""
    for number in range(kernel.CAPABILITIES):
        if number not in capabilities:
            try:
                kernel.prctl(kernel.PR_CAPBSET_DROP, number)
            except OSError:  # the operating system has no capability with this number
                break
    if user:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    mask = sum(1 << number for number in capabilities)
    header, sets = struct.pack("=II", 0x20080522, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)
    _checked(_libc.capset(header, sets), "capset")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
