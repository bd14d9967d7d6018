"""Declaration of the part `overview`: the operators' view of an engine."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="overview",
    control_operations="fumehood.overview.routes:CONTROL_OPERATIONS",
    in_engine="fumehood.overview.in_engine:EngineOverview",
)
