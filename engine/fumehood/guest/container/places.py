"""Where the writable directories of a container are, and what the container shares with the host.

Guest side. Most containers have a root file system, processes and users of their own. If the host
gives no namespaces, the guest and its programs have those of the host, and `MARK` tells their
processes from all others (`guest/core/marks.py`). Invariant: `use` is called before any other
module of the container is imported, because these copy the values.
"""

from __future__ import annotations

import os
from typing import Any

WORKSPACE = "/workspace"
TEMPORARY = "/tmp"  # noqa: S108  # the container's own
MOUNTS: tuple[str, ...] = (WORKSPACE, TEMPORARY, "/dev/shm")  # noqa: S108
"""All writable directories."""

TAKEOVER = "\0fumehood-takeover"
"""The address of the supervisor's socket for takeovers. It is abstract, because a socket file would
be in a writable directory, and programs can access all of these.
"""

COUNTERS = "/sys/fs/cgroup"
"""The directory with the counters and limits of the container's control group."""

MARK: int | None = None
"""The mark of the guest's processes, or None in a container with namespaces of its own."""

GATE_FD = -1
"""Descriptor of the socket to the warden, which holds back new processes on request."""

_GUEST = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ETC = (
    "alternatives", "fonts", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "localtime", "mime.types", "nsswitch.conf", "os-release", "passwd", "services",
)  # fmt: skip

_PROC = (
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "stat",
    "sys",
    "uptime",
    "version",
)
READABLE = (
    *(f"/etc/{name}" for name in _ETC),
    "/dev/random", "/dev/urandom", "/dev/zero", "/sys/devices/system/cpu", _GUEST,
    os.path.join(os.path.dirname(_GUEST), "protocol"),
    # A process can open only itself there: the command lines of others can hold secrets.
    "/proc/self", *(f"/proc/{name}" for name in _PROC),
)  # fmt: skip
EXECUTABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt/fumehood")
"""What programs can read and execute of the host if the container has no root file system of its
own.
"""


def use(config: dict[str, Any]) -> None:
    """Take the places from the guest's configuration, if the host gives no namespaces."""
    global WORKSPACE, TEMPORARY, MOUNTS, TAKEOVER, COUNTERS, MARK, GATE_FD
    shared = config.get("shared")
    if shared is None:
        return
    folder: str = shared["folder"]
    WORKSPACE, TEMPORARY = f"{folder}/workspace", f"{folder}/tmp"  # noqa: S108
    MOUNTS = (WORKSPACE, TEMPORARY)
    TAKEOVER = "takeover"  # in the supervisor's working directory: the whole path may be too long
    COUNTERS = f"{folder}/counters"
    MARK, GATE_FD = int(shared["mark"]), int(shared["gate_fd"])
