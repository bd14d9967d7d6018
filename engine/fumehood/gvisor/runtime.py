"""The runtime `gvisor`: sandboxes of gVisor that the launcher starts on this host.

Host side. It differs from direct sandboxes only in what starts a sandbox: the launcher runs runsc.
An ordinary user needs no subordinate ids for this, because gVisor's own kernel has all user ids.
"""

from __future__ import annotations

from functools import partial

from fumehood.direct.runtime import Direct, new_direct
from fumehood.gvisor import host
from fumehood.gvisor.starter import PROGRAM
from fumehood.sandbox.container.runtime import Unfit

STARTER = "fumehood.gvisor.starter"
"""The module that the launcher imports to start a sandbox."""


class Gvisor(Direct):
    """The runtime of the launcher's sandboxes of gVisor."""

    id = "gvisor"
    starter = STARTER
    oci_runtime = PROGRAM

    def _why_unfit(self, oci_runtime: str | None) -> Unfit | None:
        return host.why_unfit(oci_runtime)


new_gvisor = partial(new_direct, kind=Gvisor)
"""Creates the runtime of a container wall (`NewRuntime`)."""
