"""Declaration of the part `streams`: the events of a call while it runs."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="streams",
    settings="fumehood.streams.settings:SETTINGS",
    call_options="fumehood.streams.options:OPTIONS",
    operations="fumehood.streams.routes:OPERATIONS",
    in_engine="fumehood.streams.in_engine:Streams",
    methods={
        "AsyncClient": "fumehood.streams.async_client:AsyncClientWithStreams",
        "Client": "fumehood.streams.sync.client:ClientWithStreams",
        "Engine": "fumehood.streams.engine:EngineWithStreams",
    },
)
