"""The system-call filters of the process walls: allow-lists for the interpreter and for the jail.

Guest side. A child installs its filter after everything is loaded and warmed, and before it reads
its request. There are three verdicts. Named calls are allowed, some only with named commands or
kinds. Calls by which ordinary libraries look around (is there a file, what is its size) fail with
an error, so that a harmless program is not taken for an attack. Everything else ends the process
(SIGSYS), so a kernel that grows a new call does not widen the wall.

Calculations need memory and a clock. A function in the jail may also look for modules, read files
that Landlock shows it, map libraries, and run an event loop of its own. Invariant: no allowed call
reaches another process, opens a connection, starts anything, or changes a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fumehood.guest.core import seccomp
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD

Rules = Mapping[str, Sequence[seccomp.Instruction]]
"""System call → the instructions that decide about it."""

INTERPRETER_ALLOWED = (
    "brk",
    "clock_gettime",
    "exit",
    "exit_group",
    "futex",
    "getpid",
    "getrandom",
    "gettid",
    "gettimeofday",
    "madvise",
    "mremap",
    "munmap",
    "restart_syscall",
    "rt_sigprocmask",
    "rt_sigreturn",
    "sched_yield",
    "time",
)
"""System calls allowed with any arguments. `mmap`, `mprotect`, `read` and `write` are allowed with
some.
"""

INTERPRETER_REFUSED = (
    "access",
    "faccessat",
    "faccessat2",
    "fstat",
    "getcwd",
    "getdents64",
    "ioctl",
    "lseek",
    "lstat",
    "newfstatat",
    "open",
    "openat",
    "readlink",
    "readlinkat",
    "stat",
    "statx",
    "sysinfo",
    "uname",
)

JAIL_ALLOWED = (
    *INTERPRETER_ALLOWED,
    "access", "clock_getres", "clock_nanosleep", "close", "epoll_create", "epoll_create1",
    "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "faccessat", "faccessat2", "fstat",
    "getcpu", "getcwd", "getdents64", "getegid", "geteuid", "getgid", "getgroups", "getpgid",
    "getpeername", "getpgrp", "getppid", "getresgid", "getresuid", "getrusage", "getsid",
    "getsockname", "getsockopt", "getuid",
    "lseek", "lstat", "nanosleep", "newfstatat", "poll", "ppoll", "pread64", "pselect6", "read",
    "readlink", "readlinkat", "recvfrom", "rt_sigaction", "sched_getaffinity", "select",
    "shutdown", "sigaltstack", "stat", "statx", "sysinfo", "times", "uname", "write",
)  # fmt: skip
"""System calls allowed with any arguments. A SIGXCPU handler gains nothing, because the supervisor
also measures CPU time.
"""

UNTIL_NARROWED = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
"""System calls needed to narrow the view after the request is read. `build_second_filter` then
removes them.
"""

JAIL_REFUSED = (
    "alarm", "chdir", "chmod", "chown", "creat", "dup", "dup2", "dup3", "fadvise64", "fallocate",
    "fchdir", "fchmod", "fchmodat", "fchown", "fchownat", "fdatasync", "fstatfs", "fsync",
    "ftruncate", "getitimer", "getrlimit", "lchown", "link", "linkat", "mkdir", "mkdirat", "mknod",
    "mknodat", "open", "prlimit64", "rename", "renameat", "renameat2", "rmdir", "setitimer",
    "setrlimit", "setsockopt", "statfs", "symlink", "symlinkat", "truncate", "umask", "unlink",
    "unlinkat", "utimensat",
)  # fmt: skip

_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_FLAGS = 0o2004000
"""SOCK_CLOEXEC and SOCK_NONBLOCK."""

_OPEN_FOR_MORE_THAN_READING = 0o3 | 0o100 | 0o1000 | 0o20000000
"""The access mode, O_CREAT, O_TRUNC and the O_TMPFILE bit, which are the same on both
architectures.
"""

_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""Duplicate, and get or set flags. F_SETOWN is excluded: it would send signals to others."""

_IOCTL_COMMANDS = (0x5421, 0x5450, 0x5451)
"""FIONBIO, FIONCLEX, FIOCLEX. FIOSETOWN is excluded for the same reason."""

_PROT_WRITE = 2
_PROT_EXEC = 4


INTERPRETER_CONDITIONAL: Rules = MappingProxyType(
    {
        "read": seccomp.allow_if_equal(0, REQUEST_FD),
        "write": seccomp.allow_if_equal(0, REPLY_FD),
        "mmap": seccomp.allow_without_bits(2, _PROT_EXEC, seccomp.kill()),
        "mprotect": seccomp.allow_without_bits(2, _PROT_EXEC, seccomp.kill()),
    }
)
JAIL_CONDITIONAL: Rules = MappingProxyType(
    {
        "fcntl": seccomp.allow_if_in(1, _FCNTL_COMMANDS, seccomp.refuse()),
        "ioctl": seccomp.allow_if_in(1, _IOCTL_COMMANDS, seccomp.refuse()),
        # Libraries are mapped to be run; what was written never is.
        "mmap": seccomp.allow_without_all_bits(2, _PROT_WRITE | _PROT_EXEC, seccomp.refuse()),
        "mprotect": seccomp.allow_without_bits(2, _PROT_EXEC, seccomp.refuse()),
        "openat": seccomp.allow_without_bits(
            2, _OPEN_FOR_MORE_THAN_READING, seccomp.refuse(seccomp.EACCES)
        ),
        "seccomp": [
            *seccomp.require(0, seccomp.SET_MODE_FILTER),
            *seccomp.require(1, 0),
            seccomp.allow(),
        ],
        # To the other end of a pair only, never to an address.
        "sendto": seccomp.allow_if_equal(4, 0),
        # Datagrams could be sent to any socket of the host.
        "socketpair": [
            *seccomp.require(0, _AF_UNIX),
            *seccomp.require(1, _SOCK_STREAM, ignoring=_SOCK_FLAGS),
            seccomp.allow(),
        ],
    }
)
"""System calls allowed with some arguments only."""


def build_interpreter_filter(machine: str | None = None) -> bytes:
    """The filter as bytes, ready for `seccomp.install`.

    Raises:
        OSError: this machine's architecture is not supported.
    """
    rules = {
        **{name: [seccomp.allow()] for name in INTERPRETER_ALLOWED},
        **INTERPRETER_CONDITIONAL,
        **{name: [seccomp.refuse()] for name in INTERPRETER_REFUSED},
    }
    return seccomp.build(machine, rules, seccomp.kill())


def build_jail_filter(machine: str | None = None) -> bytes:
    """The filter that a child gets before it reads its request.

    Raises:
        OSError: this machine's architecture is not supported.
    """
    rules = {
        **{name: [seccomp.allow()] for name in (*JAIL_ALLOWED, *UNTIL_NARROWED)},
        **JAIL_CONDITIONAL,
        **{name: [seccomp.refuse()] for name in JAIL_REFUSED},
    }
    return seccomp.build(machine, rules, seccomp.kill())


def build_second_filter(machine: str | None = None) -> bytes:
    """The filter that the child adds to the first one once it has narrowed its view."""
    rules = {name: [seccomp.kill()] for name in (*UNTIL_NARROWED, "seccomp")}
    return seccomp.build(machine, rules, seccomp.allow())
