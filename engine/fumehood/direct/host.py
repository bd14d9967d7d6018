"""The requirements of direct sandboxes on the host.

Host side, blocking. Each check names what is missing and the remedy. Whether a limit is really
enforced is found out by the self-check of each sandbox.
"""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from fumehood.direct import ids
from fumehood.sandbox.container.runtime import Unfit

LEAST_KERNEL = (5, 12)
"""The first Linux with mount_setattr(2)."""

FORBIDDING = {
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Sysctls, and the value with which an ordinary user gets no user namespace. *Source*: Debian's
patch of Linux; Ubuntu, AppArmor user namespaces.
"""


def why_unfit(oci_runtime: str | None) -> Unfit | None:
    """Return the first reason why this host cannot run direct sandboxes, or None if it can."""
    return next(_faults(oci_runtime), None)


def is_fit() -> bool:
    """Return whether this host can run direct sandboxes."""
    return why_unfit(None) is None


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
    for name in ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup"):
        if not Path(f"/proc/self/ns/{name}").exists():
            yield Unfit(f"This kernel has no {name} namespaces.", "Use a kernel with namespaces.")
    if _user_namespaces() == 0:
        yield Unfit(
            "User namespaces are disabled on this host.",
            "Set the sysctl user.max_user_namespaces to a positive number.",
        )
    if os.geteuid() != 0:
        yield from _faults_of_user()


def _kernel() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _faults_of_user() -> Iterator[Unfit]:
    """Yield why an ordinary user cannot run sandboxes on this host."""
    for sysctl, forbids in FORBIDDING.items():
        if _read(Path("/proc/sys", sysctl)) == forbids:
            name = sysctl.replace("/", ".")
            yield Unfit(
                f"This host forbids user namespaces to ordinary users (sysctl {name}).",
                f"Run the engine as root, or change the sysctl {name}.",
            )
    for program, path in ids.MAPPERS:
        if shutil.which(program, path=ids.PATH) is None:
            yield Unfit(f"The program {program} is missing.", "apt-get install uidmap")
        try:
            ids.read_sub_ids(path, os.geteuid())
        except ids.NoIds as error:
            yield Unfit(
                f"This user has no subordinate ids: {error}.",
                f"As root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "
                f"{getpass.getuser()}",
            )


def _user_namespaces() -> int:
    text = _read(Path("/proc/sys/user/max_user_namespaces"))
    return int(text) if text.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
