"""Webhooks: signed messages to another program, stored until they are delivered.

Host side. Approvals and audit anchors are sent this way, so neither package owns it. A message is
a row written in the transaction of its event; `engine_webhook.py` delivers it.
"""
