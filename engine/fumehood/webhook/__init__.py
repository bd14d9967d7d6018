"""The webhook: it tells one address about approvals, anchors and alerts, and may take decisions."""
