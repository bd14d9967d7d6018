"""Declaration of the part `rest`, which adds tools that call REST services."""

from __future__ import annotations

from fumehood.core.part import Command, Part, ToolKind

PLACE, WHY = "remote service", "The engine sends a request; nothing of it runs here."

PART = Part(
    name="rest",
    commands={
        "tools import": Command(
            "Definitions made from documents of other kinds.",
            "fumehood.rest.command:imports",
            after="disable",
        )
    },
    executors={
        "http": ToolKind(
            executor="fumehood.rest.executor:RestExecutor",
            type="REST",
            fields=frozenset({"endpoint", "headers", "method", "response", "timeout"}),
            streams=True,
            place=PLACE,
            why=WHY,
        ),
        "http:fetch": ToolKind(
            executor="fumehood.rest.fetch:FetchExecutor", is_builtin=True, place=PLACE, why=WHY
        ),
    },
)
