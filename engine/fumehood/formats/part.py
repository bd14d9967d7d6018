"""Declaration of the part `formats`: tools and messages in the formats of model providers."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="formats",
    commands={
        "tools export": Command(
            "Print the tools as a model's provider takes them, or write them as a skill.",
            "fumehood.formats.command:export",
            after="show",
        )
    },
    operations="fumehood.formats.routes:OPERATIONS",
    in_engine="fumehood.formats.in_engine:Formats",
    methods={
        "AsyncClient": "fumehood.formats.async_client:AsyncClientWithFormats",
        "Client": "fumehood.formats.sync.client:ClientWithFormats",
        "Engine": "fumehood.formats.engine:EngineWithFormats",
    },
)
