"""Approvals: calls that wait for a human, from the request for approval to the run after it.

Host side. `stored_calls.py` has the pipeline's `Asker`, and `requests.py` stores calls and lets
them wait, start and end. `service.py` serves approvers and callers, and `scheduler.py` runs
approved calls and handles expiry and crashes; `requests.py` uses neither of them. `model.py` has
the values, `store.py` the state changes and their SQL. Invariant: every state change is one
transaction, and nothing acts on a state before that transaction is durable.
"""
