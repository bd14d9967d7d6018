"""Builds system-call filters as classic BPF programs, and installs them.

Guest side. The lists of calls are in `process/filters.py` and `container/filter.py`. A rule is a
list of instructions that decides about one system call. Between the rules of a filter, the
accumulator always holds the number of the system call.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence

from fumehood.guest.core import kernel
from fumehood.guest.core.syscalls import architecture_of, own_number

_SECCOMP = own_number("seccomp")
SET_MODE_FILTER = 1

X32_BIT = 0x40000000
"""The bit that marks system calls of the x32 ABI on x86-64. Such calls end the process."""

EPERM = 1
EACCES = 13

_RET_KILL_PROCESS = 0x80000000
_RET_ERRNO = 0x00050000
_RET_ALLOW = 0x7FFF0000

# Offsets into struct seccomp_data (<linux/seccomp.h>): number, architecture, arguments.
_OFFSET_NUMBER = 0
_OFFSET_ARCHITECTURE = 4
_OFFSET_ARGUMENTS = 16

# Classic BPF opcodes (<linux/bpf_common.h>).
_LOAD_WORD = 0x20
_AND = 0x54
_JUMP_EQUAL = 0x15
_JUMP_GREATER = 0x25
_JUMP_GREATER_EQUAL = 0x35
_JUMP_BITS_SET = 0x45
_RETURN = 0x06

Instruction = tuple[int, int, int, int]


def build(
    machine: str | None, rules: Mapping[str, Sequence[Instruction]], *otherwise: Instruction
) -> bytes:
    """Return a system-call filter, as bytes for `install`. `rules` maps names of system calls to
    their rules. Each rule must end with a verdict, such as `allow()`. The instructions `otherwise`
    decide all other calls. `machine` is an architecture such as `x86_64`, or None for this machine.

    If a program makes a call of another architecture or ABI, its process is ended. Rules for calls
    that the architecture lacks are omitted.

    Raises:
        OSError: the architecture is not supported.
    """
    architecture, numbers = architecture_of(machine)
    program = [
        _load(_OFFSET_ARCHITECTURE),
        *_unless_equal(architecture, [kill()]),
        _load(_OFFSET_NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        kill(),
    ]
    for name, body in rules.items():
        if name in numbers:
            program += [(_JUMP_EQUAL, 0, len(body), numbers[name]), *body]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, *otherwise])


def allow() -> Instruction:
    return (_RETURN, 0, 0, _RET_ALLOW)


def kill() -> Instruction:
    return (_RETURN, 0, 0, _RET_KILL_PROCESS)


def refuse(error: int = EPERM) -> Instruction:
    return (_RETURN, 0, 0, _RET_ERRNO | error)


def allow_if_equal(argument: int, value: int) -> list[Instruction]:
    """Return a rule that allows a call if its argument with the index `argument` has the value
    `value`, and otherwise ends the process.
    """
    # Both halves of the 64-bit argument: the kernel compares all of it.
    low = _OFFSET_ARGUMENTS + 8 * argument
    return [
        _load(low),
        *_unless_equal(value, [kill()]),
        _load(low + 4),
        *_unless_equal(0, [kill()]),
        allow(),
    ]


def allow_without_bits(argument: int, bits: int, otherwise: Instruction) -> list[Instruction]:
    """Return a rule that allows a call if its argument with the index `argument` has none of the
    bits `bits`. Otherwise, the verdict is `otherwise`.
    """
    return [
        _load(_OFFSET_ARGUMENTS + 8 * argument),
        (_JUMP_BITS_SET, 0, 1, bits),
        otherwise,
        allow(),
    ]


def refuse_byte(argument: int, value: int) -> list[Instruction]:
    """Return instructions that refuse a call with EPERM if the lowest byte of its argument with the
    index `argument` has the value `value`. Otherwise, the next instruction decides.
    """
    return [
        _load(_OFFSET_ARGUMENTS + 8 * argument),
        (_AND, 0, 0, 0xFF),
        (_JUMP_EQUAL, 0, 1, value),
        refuse(),
    ]


def allow_unless(values: Mapping[int, int], otherwise: Instruction) -> list[Instruction]:
    """Return a rule that allows a system call, unless all arguments in `values` have the given
    values. In that case, the verdict is `otherwise`. `values` maps the index of an argument to a
    32-bit value.
    """
    body: list[Instruction] = []
    for argument, value in values.items():
        body += [_load(_OFFSET_ARGUMENTS + 8 * argument), *_unless_equal(value, [allow()])]
    return [*body, otherwise]


def allow_unless_in(argument: int, values: Sequence[int]) -> list[Instruction]:
    """Return instructions that allow a call unless its argument with the index `argument` has one
    of `values`. If it has, the next instruction decides. Only for arguments that the operating
    system reads as 32 bits.
    """
    body = [_load(_OFFSET_ARGUMENTS + 8 * argument)]
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        body.append((_JUMP_EQUAL, left, 0, value))
    return [*body, allow()]


def allow_without_all_bits(argument: int, bits: int, otherwise: Instruction) -> list[Instruction]:
    """Return a rule that allows a call, unless its argument with the index `argument` has all of
    the bits `bits`. In that case, the verdict is `otherwise`.
    """
    return [
        _load(_OFFSET_ARGUMENTS + 8 * argument),
        (_AND, 0, 0, bits),
        *_unless_equal(bits, [allow()]),
        otherwise,
    ]


def allow_if_in(argument: int, values: Sequence[int], otherwise: Instruction) -> list[Instruction]:
    """Return a rule that allows a call if its argument with the index `argument` has one of
    `values`. Otherwise, the verdict is `otherwise`. Only for arguments that the operating system
    reads as 32 bits.
    """
    body = [_load(_OFFSET_ARGUMENTS + 8 * argument)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), allow()]
    return [*body, otherwise]


def require(argument: int, value: int, *, ignoring: int = 0) -> list[Instruction]:
    """Return instructions that end the process unless the 32-bit argument with the index `argument`
    has the value `value`. The bits in `ignoring` are cleared before the comparison. If the values
    are equal, the next instruction decides.
    """
    return [
        _load(_OFFSET_ARGUMENTS + 8 * argument),
        (_AND, 0, 0, 0xFFFFFFFF & ~ignoring),
        *_unless_equal(value, [kill()]),
    ]


def refuse_unless(argument: int, value: int) -> list[Instruction]:
    """Return instructions that refuse a call with EPERM unless the 32-bit argument with the index
    `argument` has the value `value`. If it has, the next instruction decides.
    """
    return [_load(_OFFSET_ARGUMENTS + 8 * argument), *_unless_equal(value, [refuse()])]


def refuse_greater(number: int, error: int) -> list[Instruction]:
    """Return instructions that refuse all system calls with a number above `number`. A refused call
    fails with the error number `error`.
    """
    return [(_JUMP_GREATER, 0, 1, number), refuse(error)]


def _load(offset: int) -> Instruction:
    return (_LOAD_WORD, 0, 0, offset)


def _unless_equal(value: int, body: Sequence[Instruction]) -> list[Instruction]:
    return [(_JUMP_EQUAL, len(body), 0, value), *body]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Permanently install the filter `program` on this process. `no_new_privs` must already be set
    for the process.

    Raises:
        OSError: the operating system has no seccomp filters, or refuses this one.
    """
    kernel.syscall(_SECCOMP, SET_MODE_FILTER, 0, _header(program))


def warm_up(program: bytes) -> None:
    """Prepare what `install` needs for the filter `program`. Called before a fork, so that the
    children share the result and need not prepare it themselves.
    """
    _header(program)
    kernel.warm_up()


@functools.cache
def _header(program: bytes) -> ctypes._Pointer[ctypes.Structure]:
    return ctypes.byref(_Program(len(program) // 8, program))  # type: ignore[return-value]
