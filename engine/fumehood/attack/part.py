"""Declaration of the part `attack`: attacks on this host's own walls, for `fumehood doctor`."""

from __future__ import annotations

from fumehood.core.part import Options, Part

PART = Part(
    name="attack",
    options=(Options("doctor", "fumehood.attack.command:instead", before="verbose"),),
)
