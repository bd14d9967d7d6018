"""Declaration of the part `gvisor`: containers of gVisor that the launcher starts."""

from __future__ import annotations

from fumehood.core.part import Check, Part

PART = Part(
    name="gvisor",
    after=("direct",),
    checks=(Check("gvisor", "fumehood.gvisor.doctor:check", after="Limits", group="Direct"),),
    runtime="fumehood.gvisor.runtime:new_gvisor",
    runtime_fits="fumehood.gvisor.host:is_fit",
    oci_runtime="runsc",
)
