"""The webhook: notifies one address of approvals, anchors and alerts, and may accept decisions."""
