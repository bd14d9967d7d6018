"""The system-call filters of the process walls: the common allow-list, and the jail's filters.

Guest side. A child installs its filter after everything is loaded and warmed up, and before it
reads its request. There are three verdicts. Listed calls are allowed, some only with certain
arguments. Calls with which ordinary libraries inspect their environment (whether a file exists, how
large it is) fail with an error, so that a harmless program is not taken for an attack. Everything
else ends the process (SIGSYS), so a new system call of a later kernel does not weaken the wall.

Calculations need memory and a clock. A function in the jail may also look for modules, read files
that Landlock permits, map libraries, and run its own event loop. Invariant: no allowed call reaches
another process, opens a connection, starts a process, or changes a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fumehood.guest.core import seccomp

Rules = Mapping[str, Sequence[seccomp.Instruction]]
"""System call → the instructions that decide whether it is allowed."""

COMMON_ALLOWED = (
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
"""System calls that both process walls allow with any arguments."""

JAIL_ALLOWED = (
    *COMMON_ALLOWED,
    "access", "clock_getres", "clock_nanosleep", "close", "epoll_create", "epoll_create1",
    "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "faccessat", "faccessat2", "fstat",
    "getcpu", "getcwd", "getdents64", "getegid", "geteuid", "getgid", "getgroups", "getpgid",
    "getpeername", "getpgrp", "getppid", "getresgid", "getresuid", "getrusage", "getsid",
    "getsockname", "getsockopt", "getuid",
    "lseek", "lstat", "nanosleep", "newfstatat", "poll", "ppoll", "pread64", "pselect6", "read",
    "readlink", "readlinkat", "recvfrom", "rt_sigaction", "sched_getaffinity", "select",
    "shutdown", "sigaltstack", "stat", "statx", "sysinfo", "times", "uname", "write",
)  # fmt: skip
"""System calls that the jail allows with any arguments. A program gains nothing by handling
SIGXCPU, because the supervisor also measures CPU time."""

UNTIL_NARROWED = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
"""System calls with which a child restricts its file access after it has read its request.
`build_second_filter` then forbids them.
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
"""Commands that duplicate a descriptor, and that get or set its flags. F_SETOWN is excluded,
because it could send signals to other processes.
"""

_IOCTL_COMMANDS = (0x5421, 0x5450, 0x5451)
"""FIONBIO, FIONCLEX, FIOCLEX. FIOSETOWN is excluded, because it could send signals to other
processes."""

_PROT_WRITE = 2
PROT_EXEC = 4


JAIL_CONDITIONAL: Rules = MappingProxyType(
    {
        "fcntl": seccomp.allow_if_in(1, _FCNTL_COMMANDS, seccomp.refuse()),
        "ioctl": seccomp.allow_if_in(1, _IOCTL_COMMANDS, seccomp.refuse()),
        # Libraries may be mapped as executable, but no memory is both writable and executable.
        "mmap": seccomp.allow_without_all_bits(2, _PROT_WRITE | PROT_EXEC, seccomp.refuse()),
        "mprotect": seccomp.allow_without_bits(2, PROT_EXEC, seccomp.refuse()),
        "openat": seccomp.allow_without_bits(
            2, _OPEN_FOR_MORE_THAN_READING, seccomp.refuse(seccomp.EACCES)
        ),
        "seccomp": [
            *seccomp.require(0, seccomp.SET_MODE_FILTER),
            *seccomp.require(1, 0),
            seccomp.allow(),
        ],
        # Only to the other end of a socket pair, never to an address.
        "sendto": seccomp.allow_if_equal(4, 0),
        # Datagrams could be sent to any socket of the host.
        "socketpair": [
            *seccomp.require(0, _AF_UNIX),
            *seccomp.require(1, _SOCK_STREAM, ignoring=_SOCK_FLAGS),
            seccomp.allow(),
        ],
    }
)
"""System calls that the jail allows only with some arguments."""


def build_jail_filter(machine: str | None = None) -> bytes:
    """Return the system-call filter that a child of the jail installs before it reads its request.
    `machine` is the architecture, or None for the machine that runs this code.

    Raises:
        OSError: the architecture is not supported.
    """
    rules = {
        **{name: [seccomp.allow()] for name in (*JAIL_ALLOWED, *UNTIL_NARROWED)},
        **JAIL_CONDITIONAL,
        **{name: [seccomp.refuse()] for name in JAIL_REFUSED},
    }
    return seccomp.build(machine, rules, seccomp.kill())


def build_second_filter(machine: str | None = None) -> bytes:
    """Return the second system-call filter of a child of the jail. The child installs it after it
    has restricted its file access. `machine` is the architecture, or None for the machine that runs
    this code.
    """
    rules = {name: [seccomp.kill()] for name in (*UNTIL_NARROWED, "seccomp")}
    return seccomp.build(machine, rules, seccomp.allow())
