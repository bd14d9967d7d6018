"""Declaration of the part `direct`: containers that a launcher of this software starts."""

from __future__ import annotations

from fumehood.core.part import Check, Part

PART = Part(
    name="direct",
    after=("docker",),
    checks=(Check("direct", "fumehood.direct.doctor:check", after="Docker", group="Direct"),),
    runtime="fumehood.direct.runtime:new_direct",
    runtime_fits="fumehood.direct.host:is_fit",
)
