"""The requirements of direct sandboxes on the host.

Host side, blocking. Each check names what is missing and the remedy. Whether a limit is really
enforced is found out by the self-check of each sandbox.
"""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fumehood.direct import ids
from fumehood.sandbox.container.runtime import Unfit

LEAST_KERNEL = (5, 14)
"""The first Linux that counts processes for each user namespace (RLIMIT_NPROC)."""

TRIES_NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.unshare(0x10000000 | 0x00020000 | 0x20000000):
    os._exit(1)
if os.fork() == 0:
    os._exit(2 if libc.mount(b"proc", b"/proc", b"proc", 14, None) else 0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""A program that creates a user namespace with processes of its own. Its exit code is 1 if this
fails, and 2 if /proc cannot be mounted there.
"""

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
    yield from kernel_faults()
    if not ids.may_make_namespaces():
        yield from namespace_faults()
        yield from _id_faults()


def kernel_faults() -> Iterator[Unfit]:
    """Yield what this kernel lacks, for root also."""
    if sys.platform != "linux" or _kernel() < LEAST_KERNEL:
        yield Unfit(
            "Sandboxes without Docker need Linux 5.14.",
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


def _kernel() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def namespace_faults() -> Iterator[Unfit]:
    """Yield why an ordinary user, or root in a container, cannot create namespaces on this host."""
    for sysctl, forbids in FORBIDDING.items():
        if _read(Path("/proc/sys", sysctl)) == forbids:
            name = sysctl.replace("/", ".")
            yield Unfit(
                f"This host forbids user namespaces to ordinary users (sysctl {name}).",
                f"Run the engine as root, or change the sysctl {name}.",
            )
    failed = _failed_namespaces()
    if failed == "user":
        yield Unfit(
            "This host does not let the engine create user namespaces.",
            "In a container of Docker: --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined",
        )
    elif failed == "proc":
        yield Unfit(
            "Parts of /proc are hidden in this container, so a sandbox cannot have its own.",
            "In a container of Docker: --security-opt systempaths=unconfined",
        )


def _id_faults() -> Iterator[Unfit]:
    """Yield why an ordinary user has too few user ids on this host."""
    for program, path in ids.MAPPERS if os.geteuid() != 0 else ():
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


def _failed_namespaces() -> str:
    """Create namespaces in another process. Return what failed: `user`, `proc` or ""."""
    tried = subprocess.run(  # noqa: S603 - fixed words
        [sys.executable, "-I", "-S", "-c", TRIES_NAMESPACES], capture_output=True, check=False
    )
    return {0: "", 2: "proc"}.get(tried.returncode, "user")


def _user_namespaces() -> int:
    text = _read(Path("/proc/sys/user/max_user_namespaces"))
    return int(text) if text.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
