"""Approvals: calls that wait for a human, from the request for approval to the run after approval.

Host side. `stored_calls.py` contains the class that the pipeline asks for approval (its `Asker`).
`requests.py` stores calls, lets them wait, and starts and ends them. `service.py` serves approvers
and callers. `scheduler.py` runs approved calls, and handles expiry and crashes. `requests.py` uses
neither `service.py` nor `scheduler.py`. `model.py` contains the data classes, and `store.py`
contains the state changes and their SQL. Invariant: every state change is one transaction, and no
code acts on a new state before the transaction is durable.
"""
