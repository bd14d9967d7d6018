"""Declaration of the part `trials`, which adds trials to the engine."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="trials",
    call_options="fumehood.trials.options:OPTIONS",
    in_engine="fumehood.trials.in_engine:Trials",
)
