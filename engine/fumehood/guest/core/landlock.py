"""Landlock: irrevocably restricts this process, and all that it starts, to some files.

Guest side. Invariant: a process restricted here can read beneath the given paths and nowhere else,
and can write, create and execute only where this was given. A given path that is created later
stays out of reach. Each further restriction can only remove access.

*Source*: landlock(7), <linux/landlock.h>; ABI 1 (Linux 5.13) to 7. Older kernels restrict fewer
kinds of access: ABI 1 does not restrict truncation by path.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from fumehood.guest.core import kernel
from fumehood.guest.core.pipes import held
from fumehood.guest.core.syscalls import own_number

_CREATE_RULESET = own_number("landlock_create_ruleset")
_ADD_RULE = own_number("landlock_add_rule")
_RESTRICT_SELF = own_number("landlock_restrict_self")

_ASK_FOR_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE = 1
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIRECTORY = 1 << 3
_MAKE_DEVICES = 1 << 6 | 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEVICE = 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
"""The rights that a file can have. The others are those of directories."""

# ABI → the rights that it adds to those of earlier ABIs.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEVICE}
_NET_RIGHTS = {4: 0b11}
_SCOPES = {6: 0b11}
"""Scopes that keep abstract Unix sockets and signals from leaving the restricted processes."""

RESTRICTS_TRUNCATION = 3
"""The first ABI that restricts the truncation of files by their paths."""


class Unavailable(OSError):
    """The kernel lacks Landlock, or has it disabled."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Return the kernel's version of Landlock.

    Raises:
        Unavailable: the kernel has no Landlock.
    """
    try:
        return kernel.syscall(_CREATE_RULESET, 0, 0, _ASK_FOR_VERSION)
    except OSError:
        raise Unavailable("the kernel has no Landlock") from None


def restrict_to(
    readable: Iterable[str], *, executable: Iterable[str] = (), writable: Iterable[str] = ()
) -> None:
    """Allow this process to read files at or below the paths `readable`, `executable` and
    `writable`, to execute those below `executable`, and to create, write and remove those below
    `writable`. Forbid all other file access. Paths that cannot be opened are ignored.
    `no_new_privs` must already be set for the process.

    Raises:
        Unavailable: the kernel has no Landlock.
        OSError: the kernel refuses.
    """
    version = abi()
    attributes = _RulesetAttributes(
        _up_to(version, _FILE_RIGHTS), _up_to(version, _NET_RIGHTS), _up_to(version, _SCOPES)
    )
    read = _READ_FILE | _READ_DIRECTORY
    write = attributes.handled_access_fs & ~(_EXECUTE | _MAKE_DEVICES | _IOCTL_DEVICE)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)  # type: ignore[arg-type]
    with held(ruleset):
        for paths, rights in ((readable, read), (executable, read | _EXECUTE), (writable, write)):
            for path in paths:
                _allow(ruleset, path, rights)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    with held(place):
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, place)
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)  # type: ignore[arg-type]


def _up_to(version: int, rights: dict[int, int]) -> int:
    found = 0
    for since, mask in rights.items():
        if since <= version:
            found |= mask
    return found
