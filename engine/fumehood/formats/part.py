"""The formats of model providers as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="formats",
    operations="fumehood.formats.routes:OPERATIONS",
    in_engine="fumehood.formats.in_engine:Formats",
    methods={
        "AsyncClient": "fumehood.formats.async_client:AsyncClientWithFormats",
        "Client": "fumehood.formats.sync.client:ClientWithFormats",
        "Engine": "fumehood.formats.engine:EngineWithFormats",
    },
)
