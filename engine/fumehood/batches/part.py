"""The part that adds batches of calls to the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="batches",
    operations="fumehood.batches.routes:OPERATIONS",
    methods={
        "AsyncClient": "fumehood.batches.async_client:AsyncClientWithBatches",
        "Client": "fumehood.batches.sync.client:ClientWithBatches",
        "Engine": "fumehood.batches.engine:EngineWithBatches",
    },
)
