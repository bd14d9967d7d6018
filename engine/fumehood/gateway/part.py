"""The gateway as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="gateway",
    after=("receipts", "trials"),  # which offer a tape, and say that requests are held back
    gives=frozenset({"network"}),
    settings="fumehood.gateway.settings:SETTINGS",
    in_engine="fumehood.gateway.in_engine:GatewayPart",
)
