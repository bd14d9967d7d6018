"""Declaration of the part `sight`: metrics, alerts and traces of ended calls."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="sight",
    settings="fumehood.sight.settings:SETTINGS",
    in_foreground="fumehood.sight.settings:in_foreground",
    control_operations="fumehood.sight.routes:CONTROL_OPERATIONS",
    in_engine="fumehood.sight.in_engine:Sight",
)
