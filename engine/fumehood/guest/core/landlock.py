"""Landlock: a process irrevocably restricts its own view of the file system.

Guest side, used by the jail. Invariant: a process restricted here reads beneath the named
paths and nowhere else, writes and executes nowhere, and a path that appears later is not
among them. Each further restriction can only take away.

*Source*: landlock(7), <linux/landlock.h>; ABI 1 (Linux 5.13) to 7. Older kernels know fewer kinds
of access. The file rights that this wall relies on are all in ABI 1 except truncation (ABI 3),
which the system-call filter also refuses.
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
_READ_FILE = 1 << 2
_READ_DIRECTORY = 1 << 3

# ABI → what a ruleset of it can handle; each adds to the ones before it.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_NET_RIGHTS = {4: 0b11}
_SCOPES = {6: 0b11}
"""Scopes for abstract Unix sockets and signals, so that neither reaches out of the jail."""


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


def restrict_to(readable: Iterable[str]) -> None:
    """Leave this process only reading beneath these paths. `no_new_privs` must be set.

    A path that does not exist is left out.

    Raises:
        Unavailable: the kernel has no Landlock.
        OSError: the kernel refuses.
    """
    try:
        version = kernel.syscall(_CREATE_RULESET, 0, 0, _ASK_FOR_VERSION)
    except OSError:
        raise Unavailable("the kernel has no Landlock") from None
    attributes = _RulesetAttributes(
        _up_to(version, _FILE_RIGHTS), _up_to(version, _NET_RIGHTS), _up_to(version, _SCOPES)
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)  # type: ignore[arg-type]
    with held(ruleset):
        for path in readable:
            _allow_reading(ruleset, path)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    with held(place):
        rights = _READ_FILE
        if stat.S_ISDIR(os.fstat(place).st_mode):
            rights |= _READ_DIRECTORY
        rule = _PathBeneath(rights, place)
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)  # type: ignore[arg-type]


def _up_to(version: int, rights: dict[int, int]) -> int:
    found = 0
    for since, mask in rights.items():
        if since <= version:
            found |= mask
    return found
