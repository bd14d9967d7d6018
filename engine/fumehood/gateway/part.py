"""Declaration of the part `gateway`, which gives programs access to the network."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="gateway",
    after=("receipts", "trials"),  # they offer a tape, and decide that requests are held back
    gives=frozenset({"network"}),
    settings="fumehood.gateway.settings:SETTINGS",
    in_engine="fumehood.gateway.in_engine:GatewayPart",
)
