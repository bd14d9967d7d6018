"""Runs a command as root of a user namespace with 65,536 ids, as a pod of Kubernetes with
`hostUsers: false`, `procMount: Unmasked` and an unconfined filter does.

It is executed as a script by root, with the first id on the host, a directory that replaces
`/var/lib`, and the command. It uses only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

IDS = 65_536
NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000  # user, mount, PID
PRIVATE, BIND, PLAIN = 0x4000 | 0x40000, 0x1000, 14

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    kind_ = None if kind is None else kind.encode()
    checked(libc.mount(source.encode(), target.encode(), kind_, ctypes.c_ulong(flags), None))


def inside(own_lib: str, command: list[str], told: int, asked: int) -> None:
    checked(libc.unshare(NAMESPACES))
    os.write(told, b"apart")
    os.read(asked, 1)
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)
    if os.fork():
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    mount("none", "/", None, PRIVATE)
    mount("proc", "/proc", "proc", PLAIN)
    mount(own_lib, "/var/lib", None, BIND)
    os.execv(command[0], command)


def main(first: int, own_lib: str, command: list[str]) -> int:
    apart, told = os.pipe()
    asked, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        inside(own_lib, command, told, asked)
    os.close(told)
    if os.read(apart, 5):
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 {first} {IDS}\n", encoding="ascii")
    os.write(go, b"1")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
