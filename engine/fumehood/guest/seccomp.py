"""The system-call filter of the interpreter wall: an allow-list, built as BPF by hand.

Guest side. `child` installs it after everything is loaded and warmed, and before it reads
its request. Invariant: what is not named here ends the process (SIGSYS), so a kernel that
grows a new call does not widen the wall.

A second, short list is refused with EPERM instead: calls by which ordinary libraries look
around (is there a file, what is its size). They must fail, but a harmless program that
triggers one should not be taken for an attack.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Mapping

from fumehood.guest import bpf, kernel

REQUEST_FD = 3
"""The only descriptor that a child may read from."""
REPLY_FD = 4
"""The only descriptor that a child may write to."""

ALLOWED = (
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
"""Allowed with any arguments. `mmap`, `mprotect`, `read` and `write` are allowed with some."""

REFUSED_GENTLY = (
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

# *Source*: the kernel's arch/x86/entry/syscalls/syscall_64.tbl and scripts/syscall.tbl
# (the generic table that AArch64 uses). A name that an architecture lacks has no row.
_X86_64 = {
    "read": 0, "write": 1, "open": 2, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "ioctl": 16, "access": 21, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89,
    "gettimeofday": 96, "sysinfo": 99, "gettid": 186, "time": 201, "futex": 202,
    "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231,
    "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "seccomp": 317,
    "getrandom": 318, "statx": 332, "faccessat2": 439,
}  # fmt: skip
_AARCH64 = {
    "getcwd": 17, "ioctl": 29, "faccessat": 48, "openat": 56, "getdents64": 61, "lseek": 62,
    "read": 63, "write": 64, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93,
    "exit_group": 94, "futex": 98, "clock_gettime": 113, "sched_yield": 124,
    "restart_syscall": 128, "rt_sigprocmask": 135, "rt_sigreturn": 139, "uname": 160,
    "gettimeofday": 169, "getpid": 172, "gettid": 178, "sysinfo": 179, "brk": 214,
    "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
    "seccomp": 277, "getrandom": 278, "statx": 291, "faccessat2": 439,
}  # fmt: skip

# machine → (AUDIT_ARCH_* of <linux/audit.h>, system-call numbers)
ARCHITECTURES: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}

_SECCOMP_SET_MODE_FILTER = 1
_PROT_EXEC = 4


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def build_interpreter_filter(machine: str | None = None) -> bytes:
    """The filter as bytes, ready for `install`.

    Raises:
        OSError: this machine's architecture is not supported.
    """
    architecture, numbers = architecture_of(machine)
    program = bpf.begin(architecture)
    for name in ALLOWED:
        program += bpf.for_call(numbers, name, [bpf.allow()])
    for name, descriptor in (("read", REQUEST_FD), ("write", REPLY_FD)):
        program += bpf.for_call(numbers, name, bpf.allow_if_equal(0, descriptor))
    for name in ("mmap", "mprotect"):
        program += bpf.for_call(numbers, name, bpf.allow_without_bits(2, _PROT_EXEC, bpf.kill()))
    for name in REFUSED_GENTLY:
        program += bpf.for_call(numbers, name, [bpf.refuse()])
    return bpf.pack([*program, bpf.kill()])


def architecture_of(machine: str | None = None) -> tuple[int, Mapping[str, int]]:
    """The audit number and the system-call numbers of a machine, this one unless named.

    Raises:
        OSError: it is not supported.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"no system-call filter for {machine}")
    return ARCHITECTURES[machine]


def install(program: bytes) -> None:
    """Put the filter on this process, for ever. `no_new_privs` must be set already.

    Raises:
        OSError: the kernel has no seccomp filters, or refuses this one.
    """
    kernel.syscall(_number(), _SECCOMP_SET_MODE_FILTER, 0, _header(program))


def warm_up(program: bytes) -> None:
    """Make before a fork what `install` needs: in a child it would copy pages for every call."""
    _number()
    _header(program)
    kernel.warm_up()


@functools.cache
def _number() -> int:
    return architecture_of()[1]["seccomp"]


@functools.cache
def _header(program: bytes) -> ctypes._Pointer[ctypes.Structure]:
    return ctypes.byref(_Program(len(program) // 8, program))  # type: ignore[return-value]
