"""Declaration of the part `audit`: anchors and verification of the audit chain."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="audit",
    settings="fumehood.audit.settings:SETTINGS",
    commands={
        "audit": Command(
            "The audit chain: verify, export, rotate its key.",
            "fumehood.audit.command:audit",
            after="tokens",
        )
    },
    control_operations="fumehood.audit.routes:CONTROL_OPERATIONS",
    methods={"Engine": "fumehood.audit.engine:EngineWithAudit"},
    in_engine="fumehood.audit.in_engine:Audit",
)
