"""Declaration of the part `ports`: connections to servers that run in a session."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="ports",
    commands={
        "sessions port": Command(
            "Reach a server in a session from here, until Ctrl-C: by a link for a browser.",
            "fumehood.ports.command:forward_port",
            after="stop-process",
        )
    },
    handovers="fumehood.ports.handover:HANDOVERS",
)
