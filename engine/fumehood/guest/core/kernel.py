"""The few system calls of Linux that Python does not offer, called through the C library.

Guest side. In this module, "the kernel" is the kernel of the operating system. Supervisor and
zygote load this module before anything untrusted exists. A child also has the module, but the
system-call filter decides which calls still work there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fumehood.guest.core.syscalls import own_number

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36

CLONE_PARENT = 0x00008000
"""Flag of clone(2). *Source*: <linux/sched.h>."""

_CLONE = own_number("clone")
_GETPID = own_number("getpid")

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with this option and value. Raises OSError if the kernel refuses."""
    _checked(_libc.prctl(option, value, 0, 0, 0), "prctl")


def syscall(number: int, *arguments: int | ctypes._Pointer[ctypes.Structure]) -> int:
    """Make the system call with this number, and return its result. Raises OSError if the kernel
    refuses.
    """
    return _checked(_libc.syscall(number, *arguments), f"system call {number}")


def fork_for_parent() -> int:
    """Fork a new process that is a child of this process's parent. Return its process id in this
    process, and 0 in the new process. Only the parent can reap the new process. When it ends, the
    parent gets the same signal as for the end of this process.

    The caller must have a single thread, so that no other thread holds a lock. *Source*: clone(2),
    CLONE_PARENT.

    Raises:
        OSError: the kernel refuses.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc_with_gil.syscall(_CLONE, CLONE_PARENT, 0, 0, 0, 0))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone: {os.strerror(error)}")
    return pid


@contextmanager
def files_made_as(user_id: int) -> Iterator[None]:
    """Until the block is left, create files as the user `user_id`. The thread keeps all its other
    rights.
    """
    _libc.setfsuid(user_id)
    try:
        yield
    finally:
        _libc.setfsuid(0)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_CAPABILITY_VERSION_3 = 0x20080522
"""Version of the structures of capabilities. This version takes two structures, for 64
capabilities. *Source*: capget(2).
"""


# Made once, before any fork: making them in a child would copy pages for every call.
_OWN_CAPABILITIES = ctypes.byref(_CapabilityHeader(_CAPABILITY_VERSION_3, 0))
_NO_CAPABILITIES = (_CapabilitySets * 2)()


def warm_up() -> None:
    """Touch the memory pages that the functions of this module use, and do nothing else. Called
    before a fork, so that these pages are not copied for each child.
    """
    found = (_CapabilitySets * 2)()
    _checked(_libc.capget(_OWN_CAPABILITIES, found), "capget")
    syscall(_GETPID)


CAPABILITIES = 64
"""The largest number of capabilities that fit the kernel's structures."""


def empty_bounding_set() -> None:
    """Empty this process's bounding set of capabilities. Afterwards, no descendant can gain a
    capability by starting a program.

    Raises OSError if the kernel refuses, which it does without CAP_SETPCAP.
    """
    for capability in range(CAPABILITIES):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            error = ctypes.get_errno()
            if error == errno.EINVAL:  # this kernel has no further capabilities
                return
            raise OSError(error, f"bounding set: {os.strerror(error)}")


def keep_capabilities(kept: int) -> None:
    """Drop all capabilities of this process except those in the bit mask `kept`. Raises OSError if
    the kernel refuses.
    """
    sets = (_CapabilitySets * 2)()
    sets[0].effective = sets[0].permitted = kept
    _checked(_libc.capset(_OWN_CAPABILITIES, sets), "capset")


def drop_capabilities() -> None:
    """Empty every capability set of this process. Raises OSError if the kernel refuses."""
    _checked(_libc.capset(_OWN_CAPABILITIES, _NO_CAPABILITIES), "capset")


def volunteer_for_oom(score: bytes = b"1000") -> None:
    """Set `oom_score_adj` of this process to `score`, so that the kernel kills this process before
    others if memory runs out. Failures are ignored.
    """
    try:
        # Not `open()`: its layers are cold in a child, and touching them costs more than the fork.
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(file, score)
        os.close(file)
    except OSError:
        pass  # only a request: some hosts mount /proc read-only


def unread_bytes(pipe: int) -> int:
    """Return the number of unread bytes in a pipe, or 0 if the kernel does not report it. `pipe` is
    a descriptor of one of the two ends; the other end may be closed.
    """
    found = ctypes.c_int(0)
    try:
        fcntl.ioctl(pipe, termios.FIONREAD, found)
    except OSError:
        return 0
    return found.value


def process_cpu_ns(pid: int) -> int | None:
    """Return the CPU time in nanoseconds that all threads of a process have used so far, or None if
    it cannot be read.

    *Source*: `clock_getcpuclockid(3)`; the clock's number is built from the process id.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return None


def _checked(result: int, call: str) -> int:
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
    return result
