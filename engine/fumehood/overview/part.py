"""The operators' view of an engine as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="overview",
    control_operations="fumehood.overview.routes:CONTROL_OPERATIONS",
    in_engine="fumehood.overview.in_engine:EngineOverview",
)
