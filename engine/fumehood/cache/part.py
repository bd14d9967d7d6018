"""Declaration of the part `cache`, which adds the result cache to the engine."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="cache",
    settings="fumehood.cache.settings:SETTINGS",
    commands={
        "cache": Command(
            "The result cache of the running engine.",
            "fumehood.cache.command:cache",
            after="calls",
        )
    },
    control_operations="fumehood.cache.routes:CONTROL_OPERATIONS",
    definitions="fumehood.cache.definitions:faults",
    call_options="fumehood.cache.options:OPTIONS",
    in_engine="fumehood.cache.in_engine:Cache",
)
