"""Run a command as if the kernel lacked Landlock: `python without_landlock.py COMMAND…`.

A filter answers the three system calls of Landlock with "not implemented" and is inherited.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ENOSYS = 0x00050000 | 38
ALLOW = 0x7FFF0000


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    instructions = [
        (0x20, 0, 0, 0),  # the number of the system call
        (0x35, 0, 2, 444),
        (0x35, 1, 0, 447),
        (0x06, 0, 0, ENOSYS),
        (0x06, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = Program(len(instructions), code)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        sys.exit(f"the filter could not be installed: {os.strerror(ctypes.get_errno())}")
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
