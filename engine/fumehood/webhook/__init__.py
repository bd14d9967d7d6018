"""The webhook: notifies one address of approvals, alerts and anchors of the audit chain, and may
accept decisions.
"""
