"""Declaration of the part `receipts`, which adds receipts of programs' calls to the engine."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="receipts",
    commands={
        "replay": Command(
            "Run programs again as their receipts say, and show what differs.",
            "fumehood.receipts.command:replay",
            after="run",
        )
    },
    call_options="fumehood.receipts.options:OPTIONS",
    in_engine="fumehood.receipts.in_engine:Receipts",
)
