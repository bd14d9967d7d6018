"""Declaration of the part `webhook`: signed messages about approvals, anchors and alerts."""

from __future__ import annotations

from fumehood.core.part import Check, Part

PART = Part(
    name="webhook",
    settings="fumehood.webhook.settings:SETTINGS",
    checks=(Check("webhook", "fumehood.webhook.doctor:check", after="policy"),),
    approvers="fumehood.webhook.doctor:approvers",
    control_operations="fumehood.webhook.routes:CONTROL_OPERATIONS",
    in_engine="fumehood.webhook.in_engine:Webhook",
)
