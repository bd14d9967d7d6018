"""The requirements of programs without namespaces on the host.

Host side, blocking. Each check names what is missing and the remedy.
"""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fumehood.guest.container.places import EXECUTABLE
from fumehood.guest.core import kernel, landlock
from fumehood.guest.core.syscalls import architecture_of, own_number
from fumehood.landlock.marks import LEAST_MARK
from fumehood.sandbox.container.runtime import Unfit
from fumehood.sandbox.images.recipe import HOST_PYTHON

NAME = "landlock"

LEAST_PYTHON = (3, 11)

_GET_ACTION_AVAILABLE = 2
_USER_NOTIFICATION = 0x7FC00000
"""*Source*: seccomp(2), <linux/seccomp.h>."""


def why_unfit(oci_runtime: str | None) -> Unfit | None:
    """Return the first reason why this host cannot run programs without namespaces, or None if it
    can.
    """
    return next(_faults(oci_runtime), None)


def is_fit() -> bool:
    """Return whether this host can run programs without namespaces."""
    return why_unfit(None) is None


def _faults(oci_runtime: str | None) -> Iterator[Unfit]:
    if oci_runtime not in (None, NAME):
        yield Unfit(
            f"The engine '{NAME}' knows no OCI runtime {oci_runtime!r}.",
            "Leave container.runtime out, or set container.engine to docker.",
        )
    if not _has_landlock():
        yield Unfit(
            "This kernel has no Landlock.",
            "Use Linux 5.13 or later. If the boot parameter lsm= is set, add landlock to it.",
        )
    if not _has_notification():
        yield Unfit("This kernel has no seccomp notification.", "Use Linux 5.5 or later.")
    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    if hard != resource.RLIM_INFINITY and hard < 2 * LEAST_MARK:
        yield Unfit(
            "The limit of realtime scheduling (RLIMIT_RTTIME) is too low to mark processes.",
            "Remove the limit where the service manager or PAM sets it.",
        )
    if python() is None:
        yield Unfit(
            f"Programs need {HOST_PYTHON} of version 3.11 or later.",
            "Install it with your distribution.",
        )


def _has_landlock() -> bool:
    try:
        architecture_of()
        return landlock.abi() > 0
    except OSError:
        return False


def _has_notification() -> bool:
    import ctypes

    wanted = ctypes.c_uint32(_USER_NOTIFICATION)
    try:
        kernel.syscall(own_number("seccomp"), _GET_ACTION_AVAILABLE, 0, ctypes.byref(wanted))  # type: ignore[arg-type]
    except OSError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def python() -> Path | None:
    """Return the path of the Python that runs programs, or None if there is none. Programs may
    execute only what is in the directories of the operating system.
    """
    for path in (HOST_PYTHON, Path("/usr/local/bin/python3"), Path(sys.executable).resolve()):
        is_reachable = any(path.is_relative_to(place) for place in EXECUTABLE)
        if is_reachable and path.exists() and _version(path) >= LEAST_PYTHON:
            return path
    return None


def _version(path: Path) -> tuple[int, ...]:
    words = "import sys; print(*sys.version_info[:3])"
    said = subprocess.run(  # noqa: S603 - fixed words
        [path, "-I", "-S", "-c", words], env={"HOME": os.sep}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return tuple(int(number) for number in said.stdout.split() if number.isdigit())
