"""The requirements of direct sandboxes on the host.

Host side, blocking. Each check names what is missing and the remedy. Whether a limit is really
enforced is found out by the self-check of each sandbox.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from fumehood.direct import cgroups
from fumehood.sandbox.container.runtime import Unfit

LEAST_KERNEL = (5, 12)
"""The first Linux with mount_setattr(2)."""


def why_unfit(oci_runtime: str | None) -> Unfit | None:
    """Return the first reason why this host cannot run direct sandboxes, or None if it can."""
    return next(_faults(oci_runtime), None)


def _faults(oci_runtime: str | None) -> Iterator[Unfit]:
    if oci_runtime is not None:
        yield Unfit(
            f"The engine 'direct' knows no OCI runtime {oci_runtime!r}.",
            "Leave container.runtime out, or set container.engine to docker.",
        )
    if sys.platform != "linux" or _kernel() < LEAST_KERNEL:
        yield Unfit(
            "Direct sandboxes need Linux 5.12.",
            "Use a newer kernel, or set container.engine to docker.",
        )
    if os.geteuid() != 0:
        yield Unfit(
            "Direct sandboxes need root here.",
            "Run the engine as root, or set container.engine to docker.",
        )
    missing = _missing_controllers()
    if missing:
        yield Unfit(
            f"This host has no control groups for {', '.join(missing)}.",
            "Mount the cgroup controllers at /sys/fs/cgroup, writable for root.",
        )
    for name in ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup"):
        if not Path(f"/proc/self/ns/{name}").exists():
            yield Unfit(f"This kernel has no {name} namespaces.", "Use a kernel with namespaces.")
    if _user_namespaces() == 0:
        yield Unfit(
            "User namespaces are disabled on this host.",
            "Set the sysctl user.max_user_namespaces to a positive number.",
        )


def _kernel() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _missing_controllers() -> list[str]:
    root = Path(cgroups.ROOT)
    unified = root / "cgroup.controllers"
    if unified.exists():
        is_writable = os.access(root / "cgroup.subtree_control", os.W_OK)
        found = set(unified.read_text(encoding="ascii").split()) if is_writable else set()
    else:
        found = {name for name in cgroups.NEEDED if os.access(root / name, os.W_OK)}
    return [name for name in cgroups.NEEDED if name not in found]


def _user_namespaces() -> int:
    try:
        return int(Path("/proc/sys/user/max_user_namespaces").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
