"""Detection of sealed children from outside, on hosts where every process has a seccomp filter.

A container or a hardened service gives every process a filter before the engine starts.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

# A filter that allows everything counts like any other.
PROGRAM = """
import ctypes, os, signal, struct, sys
from fumehood.guest.core.children import is_sealed, own_filters
libc = ctypes.CDLL(None, use_errno=True)
def add_filter():
    instructions = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(instructions)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
def child(filters):
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(filters):
            add_filter()
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    seen = is_sealed(pid, own_filters())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return seen
print(child(0), child(1))
add_filter()
print(child(0), child(1))
"""


@pytest.mark.row("S2")
def test_inherited_seccomp_filter_does_not_count_as_sealed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, timeout=600, check=True
    )
    assert done.stdout.decode().splitlines() == ["False True", "False True"]
