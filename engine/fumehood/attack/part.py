"""The attacks on this host's walls as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Options, Part

PART = Part(
    name="attack",
    options=(Options("doctor", "fumehood.attack.command:instead", before="verbose"),),
)
