"""The interpreter's system-call filter: an allow-list for calculations.

Guest side. `guest/process/filters.py` explains the verdicts. Invariant: no allowed call opens a
file, reaches another process, opens a connection, starts a process, or makes memory executable.
"""

from __future__ import annotations

from types import MappingProxyType

from fumehood.guest.core import seccomp
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD
from fumehood.guest.process.filters import COMMON_ALLOWED, PROT_EXEC, Rules

REFUSED = (
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

CONDITIONAL: Rules = MappingProxyType(
    {
        "read": seccomp.allow_if_equal(0, REQUEST_FD),
        "write": seccomp.allow_if_equal(0, REPLY_FD),
        "mmap": seccomp.allow_without_bits(2, PROT_EXEC, seccomp.kill()),
        "mprotect": seccomp.allow_without_bits(2, PROT_EXEC, seccomp.kill()),
    }
)
"""System calls that are allowed only with some arguments."""


def build_interpreter_filter(machine: str | None = None) -> bytes:
    """Return the system-call filter of the interpreter, as bytes for `seccomp.install`. `machine`
    is the architecture, or None for the machine that runs this code.

    Raises:
        OSError: the architecture is not supported.
    """
    rules = {
        **{name: [seccomp.allow()] for name in COMMON_ALLOWED},
        **CONDITIONAL,
        **{name: [seccomp.refuse()] for name in REFUSED},
    }
    return seccomp.build(machine, rules, seccomp.kill())
