"""The system-call filter of a container's programs. It is an allow-list for whole programs.

Guest side. Zygotes install the filter for all their children. A keeper's child installs it before
it becomes a registered program. The filter is installed on every runtime, because old `runsc`
ignores the container's own profile.

Invariant: the filter allows nothing that Docker's default profile refuses to a container without
capabilities. It also refuses System V IPC, POSIX message queues, keyrings, `io_uring`,
`userfaultfd`, `perf_event_open`, `ptrace` and other access to processes, namespaces, `inotify`
(because its instances are counted over all containers together), and all sockets except Unix and IP
sockets. Of the system calls that change user or groups, the filter allows the three with which a
child becomes the programs' user. After that, the child has no capabilities, so the kernel refuses
any other use of these calls. The filter also refuses the ways in which a program could make the
kernel send SIGCONT to the program's own process, because that process may be stopped to keep the
session's variables.

A refused call fails with EPERM and the program continues, because whole programs try many calls
that they can do without. A call that is newer than this list fails with ENOSYS, which libraries
handle.
"""

from __future__ import annotations

import fcntl
import mmap
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fumehood.guest.core import kernel, seccomp
from fumehood.guest.core.syscalls import HIGHEST_KNOWN

ENOSYS, EINVAL = 38, 22
SOL_SOCKET = 1

ALLOWED = (
    "accept", "accept4", "access", "alarm", "arch_prctl", "bind", "brk", "capget", "capset",
    "chdir", "chmod", "chown", "clock_getres", "clock_gettime", "clock_nanosleep", "close",
    "close_range", "connect", "copy_file_range", "creat", "dup", "dup2", "dup3", "epoll_create",
    "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd",
    "eventfd2", "execve", "execveat", "exit", "exit_group", "faccessat", "faccessat2", "fadvise64",
    "fallocate", "fchdir", "fchmod", "fchmodat", "fchown", "fchownat", "fdatasync", "fgetxattr",
    "flistxattr", "flock", "fork", "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync",
    "ftruncate", "futex", "futex_waitv", "futimesat", "get_robust_list", "getcpu", "getcwd",
    "getdents", "getdents64", "getegid", "geteuid", "getgid", "getgroups", "getitimer",
    "getpeername", "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getrandom",
    "getresgid", "getresuid", "getrlimit", "getrusage", "getsid", "getsockname", "getsockopt",
    "gettid", "gettimeofday", "getuid", "getxattr", "ioprio_get", "kill",
    "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "lchown", "lgetxattr",
    "link", "linkat", "listen", "listxattr", "llistxattr", "lremovexattr", "lseek", "lsetxattr",
    "lstat", "madvise", "membarrier", "memfd_create", "mincore", "mkdir", "mkdirat", "mknod",
    "mknodat", "mmap", "mprotect", "mremap", "msync", "munmap", "nanosleep", "newfstatat", "open",
    "openat", "openat2", "pause", "pidfd_open", "pidfd_send_signal", "pipe", "pipe2", "pkey_alloc",
    "pkey_free", "pkey_mprotect", "poll", "ppoll", "pread64", "preadv", "preadv2", "prlimit64",
    "pselect6", "pwrite64", "pwritev", "pwritev2", "read", "readahead", "readlink", "readlinkat",
    "readv", "recvfrom", "recvmmsg", "recvmsg", "removexattr", "rename", "renameat", "renameat2",
    "restart_syscall", "rmdir", "rseq", "rt_sigaction", "rt_sigpending", "rt_sigprocmask",
    "rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo",
    "sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity", "sched_getattr",
    "sched_getparam", "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity",
    "sched_setattr", "sched_setparam", "sched_setscheduler", "sched_yield", "seccomp", "select",
    "sendfile", "sendmmsg", "sendmsg", "sendto", "set_robust_list", "set_tid_address", "setgroups",
    "setitimer", "setpgid", "setpriority", "setresgid", "setresuid", "setrlimit", "setsid",
    "setsockopt", "setxattr", "shutdown", "sigaltstack", "signalfd", "signalfd4", "splice", "stat",
    "statfs", "statx", "symlink", "symlinkat", "sync_file_range", "sysinfo", "tee", "tgkill",
    "time", "timerfd_create", "timerfd_gettime", "timerfd_settime", "times", "tkill", "truncate",
    "umask", "uname", "unlink", "unlinkat", "utime", "utimensat", "utimes", "vfork", "vmsplice",
    "wait4", "waitid", "write", "writev",
)  # fmt: skip
"""System calls that are allowed with any arguments."""

_NAMESPACES = 0x7E020000
"""All CLONE_NEW… flags of <linux/sched.h> that `clone` accepts (CLONE_NEWTIME needs `clone3`)."""

_SAME_PERSONALITIES = (0x0, 0xFFFFFFFF)
"""Allowed arguments of `personality`: plain Linux, and the query of the current value."""

_MOVE_EXTENTS = 0xC028660F
"""EXT4_IOC_MOVE_EXT of fs/ext4/ext4.h. This command exchanges blocks, and thus contents, between
two files without changing their times. It is refused, because `files` detects changed files on a
disk by their times.
"""

_ADDRESS_FAMILIES = (1, 2, 10)
"""Allowed families of sockets: Unix, IPv4 and IPv6. Of the others, AF_VSOCK leads out of virtual
machines, and AF_ALG, AF_PACKET and AF_NETLINK reach parts of the Linux kernel that no program needs
here.
"""


DECIDED: Mapping[str, Sequence[seccomp.Instruction]] = MappingProxyType(
    {
        "clone": [
            *seccomp.refuse_byte(0, signal.SIGCONT),  # sent to the parent when the child ends
            *seccomp.allow_without_bits(0, _NAMESPACES, seccomp.refuse()),
        ],
        "clone3": [seccomp.refuse(ENOSYS)],  # its flags are in memory, which filters cannot read
        "fcntl": seccomp.allow_unless({1: fcntl.F_SETSIG, 2: signal.SIGCONT}, seccomp.refuse()),
        "ioctl": seccomp.allow_unless({1: _MOVE_EXTENTS}, seccomp.refuse()),
        "prctl": seccomp.allow_unless(
            {0: kernel.PR_SET_PDEATHSIG, 1: signal.SIGCONT}, seccomp.refuse()
        ),
        "personality": seccomp.allow_if_in(0, _SAME_PERSONALITIES, seccomp.refuse()),
        "socket": seccomp.allow_if_in(0, _ADDRESS_FAMILIES, seccomp.refuse()),
        "socketpair": seccomp.allow_if_in(0, _ADDRESS_FAMILIES, seccomp.refuse()),
        "timer_create": [seccomp.refuse(ENOSYS)],  # its signal is also in memory
    }
)
"""System calls that are allowed only with some arguments, and the instructions that decide about
them.
"""


_SHARED_WITHOUT_FILE = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS

_SIZES_OF_BUFFERS = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE and SO_RCVBUFFORCE. *Source*: <asm-generic/socket.h>."""

UNCOUNTED: Mapping[str, Sequence[seccomp.Instruction]] = MappingProxyType(
    {
        "memfd_create": [seccomp.refuse(ENOSYS)],
        "mmap": seccomp.allow_without_all_bits(3, _SHARED_WITHOUT_FILE, seccomp.refuse()),
        # Programs copy by other means after this error, as for files that cannot be sent.
        **{name: [seccomp.refuse(EINVAL)] for name in ("sendfile", "splice", "tee", "vmsplice")},
        # Buffers keep their size, and the program is not told so.
        "setsockopt": [
            *seccomp.allow_unless_in(2, _SIZES_OF_BUFFERS),
            *seccomp.allow_unless({1: SOL_SOCKET}, seccomp.refuse(0)),
        ],
    }
)
"""System calls for memory that belongs to no process and no file, or is held by a pipe or a socket.
They are refused if the memory of programs is watched (`watch`), because it would not be found.
"""


_AF_UNIX, _SOCK_DGRAM, _SOCK_RAW = 1, 2, 3
_F_SETOWN, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 15, 0x8901, 0x8902
_RLIMIT_RTTIME, _EOPNOTSUPP = 15, 95


def _only_own(argument: int) -> list[seccomp.Instruction]:
    """Return a rule that allows a call for this process only, which it names by 0."""
    return seccomp.allow_if_in(argument, (0,), seccomp.refuse())


SHARED: Mapping[str, Sequence[seccomp.Instruction]] = MappingProxyType(
    {
        # Without a network namespace, every socket but a pair leads out.
        **{
            name: [seccomp.refuse()]
            for name in ("accept", "accept4", "bind", "connect", "listen", "socket")
        },
        # A datagram can be sent to an address.
        "socketpair": [
            *seccomp.refuse_unless(0, _AF_UNIX),
            *seccomp.refuse_byte(1, _SOCK_DGRAM),
            *seccomp.refuse_byte(1, _SOCK_RAW),  # means the same
            seccomp.allow(),
        ],
        # These reach other processes of the same user. The warden checks `kill` and `tgkill`.
        **{name: _only_own(0) for name in (
            "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler",
        )},
        "setpriority": _only_own(1),
        **{name: [seccomp.refuse()] for name in (
            "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "tkill",
        )},
        "pidfd_open": [seccomp.refuse(ENOSYS)],  # libraries then use `kill`
        "fcntl": [
            *seccomp.allow_unless_in(1, (fcntl.F_SETSIG, _F_SETOWN, _F_SETOWN_EX)),
            seccomp.refuse(),
        ],
        "ioctl": [
            *seccomp.allow_unless_in(1, (_MOVE_EXTENTS, _FIOSETOWN, _SIOCSPGRP)),
            seccomp.refuse(),
        ],
        # No process may change its mark.
        "prlimit64": [
            *seccomp.refuse_unless(0, 0),
            *seccomp.allow_unless({1: _RLIMIT_RTTIME}, seccomp.refuse()),
        ],
        "setrlimit": seccomp.allow_unless({0: _RLIMIT_RTTIME}, seccomp.refuse()),
        # These change files that Landlock only lets a process read. The warden checks `chmod` and
        # the changes of times.
        **{name: [seccomp.refuse()] for name in (
            "chown", "fchown", "fchownat", "lchown", "truncate",
        )},
        **{name: [seccomp.refuse(_EOPNOTSUPP)] for name in (
            "fremovexattr", "fsetxattr", "lremovexattr", "lsetxattr", "removexattr", "setxattr",
        )},
        "futimesat": [seccomp.refuse(ENOSYS)],
    }
)  # fmt: skip
"""What is also refused if the host gives no namespaces. Landlock does not restrict these calls,
or only on newer kernels.
"""


def build_container_filter(
    machine: str | None = None, *, is_watched: bool = False, is_shared: bool = False
) -> bytes:
    """Return the system-call filter of a container's programs for a machine's architecture, as
    bytes for `seccomp.install`. If `machine` is None, the filter is for this machine. `is_watched`
    says whether the guest watches the memory, and `is_shared` that the host gives no namespaces.

    Raises:
        OSError: the machine's architecture is not supported.
    """
    rules = {**DECIDED, **{name: [seccomp.allow()] for name in ALLOWED}}
    if is_watched:
        rules |= UNCOUNTED
    if is_shared:
        rules |= SHARED
    newer = seccomp.refuse_greater(HIGHEST_KNOWN, ENOSYS)
    return seccomp.build(machine, rules, *newer, seccomp.refuse())
