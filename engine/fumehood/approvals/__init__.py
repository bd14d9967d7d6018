"""Approvals: calls that wait for a human, from the question to the run after it.

Host side. Start with `service.py`, which is what calls and approvers see. `model.py` and
`states.py` are values, `store.py` is the SQL, `scheduler.py` handles time and crashes, and
`resume.py` runs an approved call through the pipeline again. Invariant: every state change is one
transaction in the database, and nothing acts on a state before that transaction is durable.
"""
