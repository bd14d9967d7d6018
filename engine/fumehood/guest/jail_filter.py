"""The system-call filter of the jail: the interpreter's list, and what Python needs to import.

Guest side. A function may look for modules, read files that Landlock shows it, map
libraries and run an event loop of its own. Invariants: no call on these lists reaches
another process, opens a connection, starts anything, or changes a file; every call that
takes a command or a kind is allowed with named ones only.

As in the interpreter there are three verdicts: allowed, refused with an error (what a
harmless library tries too), and the end of the process for everything else.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from types import MappingProxyType

from fumehood.guest import bpf, seccomp

ALLOWED = (
    *seccomp.ALLOWED,
    "access", "clock_getres", "clock_nanosleep", "close", "epoll_create", "epoll_create1",
    "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "faccessat", "faccessat2", "fstat",
    "getcpu", "getcwd", "getdents64", "getegid", "geteuid", "getgid", "getgroups", "getpgid",
    "getpeername", "getpgrp", "getppid", "getresgid", "getresuid", "getrusage", "getsid",
    "getsockname", "getsockopt", "getuid",
    "lseek", "lstat", "nanosleep", "newfstatat", "poll", "ppoll", "pread64", "pselect6", "read",
    "readlink", "readlinkat", "recvfrom", "rt_sigaction", "sched_getaffinity", "select",
    "shutdown", "sigaltstack", "stat", "statx", "sysinfo", "times", "uname", "write",
)  # fmt: skip
"""Allowed with any arguments. A handler for SIGXCPU gains nothing: the supervisor measures too."""

CONDITIONAL = (
    "fcntl",
    "ioctl",
    "mmap",
    "mprotect",
    "openat",
    "seccomp",
    "sendto",
    "socketpair",
)
"""Allowed with some arguments; see `_conditions`."""

UNTIL_NARROWED = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
"""Needed once more after the request is read; `build_second_filter` takes them away."""

REFUSED_GENTLY = (
    "alarm", "chdir", "chmod", "chown", "creat", "dup", "dup2", "dup3", "fadvise64", "fallocate",
    "fchdir", "fchmod", "fchmodat", "fchown", "fchownat", "fdatasync", "fstatfs", "fsync",
    "ftruncate", "getitimer", "getrlimit", "lchown", "link", "linkat", "mkdir", "mkdirat", "mknod",
    "mknodat", "open", "prlimit64", "rename", "renameat", "renameat2", "rmdir", "setitimer",
    "setrlimit", "setsockopt", "statfs", "symlink", "symlinkat", "truncate", "umask", "unlink",
    "unlinkat", "utimensat",
)  # fmt: skip

# *Source*: as in `seccomp`. Only what the interpreter's tables lack.
_X86_64 = {
    "close": 3, "poll": 7, "rt_sigaction": 13, "pread64": 17, "select": 23, "dup": 32, "dup2": 33,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "sendto": 44, "recvfrom": 45,
    "shutdown": 48, "getsockname": 51, "getpeername": 52, "socketpair": 53, "setsockopt": 54,
    "getsockopt": 55, "fcntl": 72, "fsync": 74, "fdatasync": 75, "truncate": 76,
    "ftruncate": 77, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85,
    "link": 86, "unlink": 87, "symlink": 88, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93,
    "lchown": 94, "umask": 95, "getrlimit": 97, "getrusage": 98, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124, "sigaltstack": 131,
    "mknod": 133, "statfs": 137, "fstatfs": 138, "setrlimit": 160, "sched_getaffinity": 204,
    "epoll_create": 213, "fadvise64": 221, "clock_getres": 229, "clock_nanosleep": 230,
    "epoll_wait": 232, "epoll_ctl": 233, "mkdirat": 258, "mknodat": 259, "fchownat": 260,
    "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "fchmodat": 268,
    "pselect6": 270, "ppoll": 271, "utimensat": 280, "epoll_pwait": 281, "fallocate": 285,
    "epoll_create1": 291, "dup3": 292, "prlimit64": 302, "getcpu": 309, "renameat2": 316,
    "epoll_pwait2": 441, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}  # fmt: skip
_AARCH64 = {
    "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23, "dup3": 24, "fcntl": 25,
    "mknodat": 33, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38,
    "statfs": 43, "fstatfs": 44, "truncate": 45, "ftruncate": 46, "fallocate": 47, "chdir": 49,
    "fchdir": 50, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "close": 57,
    "pread64": 67, "pselect6": 72, "ppoll": 73, "fsync": 82, "fdatasync": 83, "utimensat": 88,
    "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_getres": 114,
    "clock_nanosleep": 115, "sched_getaffinity": 123, "sigaltstack": 132, "rt_sigaction": 134,
    "getresuid": 148, "getresgid": 150, "times": 153, "getpgid": 155, "getsid": 156,
    "getgroups": 158, "getrlimit": 163, "setrlimit": 164, "getrusage": 165, "umask": 166,
    "getcpu": 168, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
    "socketpair": 199, "getsockname": 204, "getpeername": 205, "sendto": 206, "recvfrom": 207,
    "setsockopt": 208, "getsockopt": 209, "shutdown": 210, "fadvise64": 223,
    "prlimit64": 261, "renameat2": 276, "epoll_pwait2": 441, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446,
}  # fmt: skip

NUMBERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "x86_64": seccomp.ARCHITECTURES["x86_64"][1] | _X86_64,  # type: ignore[operator]
        "aarch64": seccomp.ARCHITECTURES["aarch64"][1] | _AARCH64,  # type: ignore[operator]
    }
)

_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_FLAGS = 0o2004000
"""SOCK_CLOEXEC and SOCK_NONBLOCK."""

_OPEN_FOR_MORE_THAN_READING = 0o3 | 0o100 | 0o1000 | 0o20000000
"""The access mode, O_CREAT, O_TRUNC and the bit of O_TMPFILE; alike on both machines."""

_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""Duplicate, and get or set flags. F_SETOWN is none of them: it would send signals to others."""

_IOCTL_COMMANDS = (0x5421, 0x5450, 0x5451)
"""FIONBIO, FIONCLEX, FIOCLEX. FIOSETOWN is none of them, for the same reason."""

_PROT_WRITE = 2
_PROT_EXEC = 4
_SECCOMP_SET_MODE_FILTER = 1


def build_jail_filter(machine: str | None = None) -> bytes:
    """The filter that a child gets before it reads its request.

    Raises:
        OSError: this machine's architecture is not supported.
    """
    architecture, numbers = _architecture_of(machine)
    program = bpf.begin(architecture)
    for name in (*ALLOWED, *UNTIL_NARROWED):
        program += bpf.for_call(numbers, name, [bpf.allow()])
    for name in CONDITIONAL:
        program += bpf.for_call(numbers, name, _conditions(name))
    for name in REFUSED_GENTLY:
        program += bpf.for_call(numbers, name, [bpf.refuse()])
    return bpf.pack([*program, bpf.kill()])


def build_second_filter(machine: str | None = None) -> bytes:
    """What stands in front of the first one when the child has narrowed its view for good."""
    architecture, numbers = _architecture_of(machine)
    program = bpf.begin(architecture)
    for name in (*UNTIL_NARROWED, "seccomp"):
        program += bpf.for_call(numbers, name, [bpf.kill()])
    return bpf.pack([*program, bpf.allow()])


def _architecture_of(machine: str | None) -> tuple[int, Mapping[str, int]]:
    architecture, _ = seccomp.architecture_of(machine)
    return architecture, NUMBERS[machine or platform.machine()]


def _conditions(name: str) -> list[bpf.Instruction]:
    match name:
        case "openat":
            return bpf.allow_without_bits(2, _OPEN_FOR_MORE_THAN_READING, bpf.refuse(bpf.EACCES))
        case "fcntl":
            return bpf.allow_if_in(1, _FCNTL_COMMANDS, bpf.refuse())
        case "ioctl":
            return bpf.allow_if_in(1, _IOCTL_COMMANDS, bpf.refuse())
        case "mmap":  # libraries are mapped to be run; what was written never is
            return bpf.allow_without_all_bits(2, _PROT_WRITE | _PROT_EXEC, bpf.refuse())
        case "mprotect":
            return bpf.allow_without_bits(2, _PROT_EXEC, bpf.refuse())
        case "sendto":  # to the other end of a pair only, never to an address
            return bpf.allow_if_equal(4, 0)
        case "socketpair":  # datagrams could be sent to any socket of the host
            return [
                *bpf.require(0, _AF_UNIX),
                *bpf.require(1, _SOCK_STREAM, ignoring=_SOCK_FLAGS),
                bpf.allow(),
            ]
        case "seccomp":
            return [*bpf.require(0, _SECCOMP_SET_MODE_FILTER), *bpf.require(1, 0), bpf.allow()]
        case _:
            raise AssertionError(name)
