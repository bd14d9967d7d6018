"""Declaration of the part `landlock`: programs on hosts that give no namespaces."""

from __future__ import annotations

from fumehood.core.part import Check, Part

PART = Part(
    name="landlock",
    after=("gvisor",),
    checks=(Check("landlock", "fumehood.landlock.doctor:check", after="Limits", group="Direct"),),
    runtime="fumehood.landlock.runtime:new_landlock",
    runtime_fits="fumehood.landlock.host:is_fit",
    oci_runtime="landlock",
)
