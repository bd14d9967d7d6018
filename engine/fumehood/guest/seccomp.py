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
import os
import platform
import struct
from collections.abc import Mapping, Sequence

from fumehood.guest import kernel

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

X32_BIT = 0x40000000
"""x86-64 knows a second set of numbers with this bit set; none of them is wanted."""

_SECCOMP_SET_MODE_FILTER = 1
_RET_KILL_PROCESS = 0x80000000
_RET_ERRNO = 0x00050000
_RET_ALLOW = 0x7FFF0000
_PROT_EXEC = 4
_EPERM = 1

# Offsets into struct seccomp_data (<linux/seccomp.h>): number, architecture, arguments.
_OFFSET_NUMBER = 0
_OFFSET_ARCHITECTURE = 4
_OFFSET_ARGUMENTS = 16

# Classic BPF opcodes (<linux/bpf_common.h>).
_LOAD_WORD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_BITS_SET = 0x45
_RETURN = 0x06

Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def build_interpreter_filter(machine: str | None = None) -> bytes:
    """The filter as bytes, ready for `install`.

    Raises:
        OSError: this machine's architecture is not supported.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"no system-call filter for {machine}")
    architecture, numbers = ARCHITECTURES[machine]
    program = [
        _load(_OFFSET_ARCHITECTURE),
        *_unless_equal(architecture, [_ret(_RET_KILL_PROCESS)]),
        _load(_OFFSET_NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        _ret(_RET_KILL_PROCESS),
    ]
    for name in ALLOWED:
        program += _for_call(numbers, name, [_ret(_RET_ALLOW)])
    for name, descriptor in (("read", REQUEST_FD), ("write", REPLY_FD)):
        program += _for_call(numbers, name, _allow_if_equal(0, descriptor))
    for name in ("mmap", "mprotect"):
        program += _for_call(numbers, name, _allow_without_bits(2, _PROT_EXEC))
    for name in REFUSED_GENTLY:
        program += _for_call(numbers, name, [_ret(_RET_ERRNO | _EPERM)])
    program.append(_ret(_RET_KILL_PROCESS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install(program: bytes) -> None:
    """Put the filter on this process, for ever. `no_new_privs` must be set already.

    Raises:
        OSError: the kernel has no seccomp filters, or refuses this one.
    """
    _, numbers = ARCHITECTURES[os.uname().machine]
    header = _Program(len(program) // 8, program)
    kernel.syscall(numbers["seccomp"], _SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(header))  # type: ignore[arg-type]


def _load(offset: int) -> Instruction:
    return (_LOAD_WORD, 0, 0, offset)


def _ret(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _unless_equal(value: int, body: Sequence[Instruction]) -> list[Instruction]:
    return [(_JUMP_EQUAL, len(body), 0, value), *body]


def _for_call(
    numbers: Mapping[str, int], name: str, body: Sequence[Instruction]
) -> list[Instruction]:
    """`body` for this system call; the accumulator holds the number before and after."""
    if name not in numbers:
        return []
    return [(_JUMP_EQUAL, 0, len(body), numbers[name]), *body]


def _allow_if_equal(argument: int, value: int) -> list[Instruction]:
    # Both halves of the 64-bit argument: the kernel compares all of it.
    low = _OFFSET_ARGUMENTS + 8 * argument
    return [
        _load(low),
        *_unless_equal(value, [_ret(_RET_KILL_PROCESS)]),
        _load(low + 4),
        *_unless_equal(0, [_ret(_RET_KILL_PROCESS)]),
        _ret(_RET_ALLOW),
    ]


def _allow_without_bits(argument: int, bits: int) -> list[Instruction]:
    return [
        _load(_OFFSET_ARGUMENTS + 8 * argument),
        (_JUMP_BITS_SET, 0, 1, bits),
        _ret(_RET_KILL_PROCESS),
        _ret(_RET_ALLOW),
    ]
