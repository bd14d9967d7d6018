"""Approvals: calls that wait for a human, from the request for approval to the run after it.

Host side. `stored_calls.py` contains the pipeline's `Asker`. `requests.py` stores calls, lets them
wait, and starts and ends them. `service.py` serves approvers and callers, and `scheduler.py` runs
approved calls and handles expiry and crashes. `requests.py` uses neither of these two. `model.py`
contains the values, and `store.py` contains the state changes and their SQL. Invariant: every state
change is one transaction, and no code acts on a new state before the transaction is durable.
"""
