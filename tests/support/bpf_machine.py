"""A small classic BPF interpreter: computes the kernel's verdict on one system call."""

from __future__ import annotations

import struct


def decide(filter_program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a seccomp filter on one system call; `arguments` are 64 bits each."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(list(arguments) + [0] * 6)[:6])
    program = list(struct.iter_unpack("=HBBI", filter_program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x25:
                at += if_true if accumulator > value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")
