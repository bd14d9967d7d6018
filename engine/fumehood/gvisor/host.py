"""The requirements of gVisor's sandboxes on the host.

Host side, blocking. Each check names what is missing and the remedy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from fumehood.direct import ids
from fumehood.direct.host import kernel_faults, namespace_faults
from fumehood.direct.sandbox import PATH
from fumehood.gvisor.starter import PROGRAM
from fumehood.sandbox.container.runtime import Unfit


def why_unfit(oci_runtime: str | None) -> Unfit | None:
    """Return the first reason why this host cannot run sandboxes of gVisor without Docker, or None
    if it can.
    """
    return next(_faults(oci_runtime), None)


def is_fit() -> bool:
    """Return whether this host can run sandboxes of gVisor without Docker."""
    return why_unfit(None) is None


def _faults(oci_runtime: str | None) -> Iterator[Unfit]:
    if oci_runtime not in (None, PROGRAM):
        yield Unfit(
            f"The engine 'gvisor' knows no OCI runtime {oci_runtime!r}.",
            "Leave container.runtime out, or set container.engine to docker.",
        )
    yield from kernel_faults()
    if shutil.which(PROGRAM, path=PATH) is None:
        yield Unfit("The program runsc is missing.", "apt-get install runsc")
    if not ids.may_make_namespaces():
        yield from namespace_faults()


def version() -> str:
    """Return the version of runsc, such as `0.0~20221219.0`, or "" if it does not say."""
    path = shutil.which(PROGRAM, path=PATH)
    if path is None:
        return ""
    environment = {"PATH": PATH, "HOME": os.sep}
    said = subprocess.run(  # noqa: S603 - fixed words
        [path, "--version"], env=environment, capture_output=True, text=True, check=False
    )
    return said.stdout.partition("\n")[0].removeprefix("runsc version ").strip()
