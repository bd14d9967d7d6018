"""Approvals: calls that wait for a human, from the question to the run after the approval.

Host side. The pipeline uses `requests.py`: a call asks, waits, starts and ends. Above the pipeline,
`service.py` serves approvers and callers, and `scheduler.py` runs approved calls and handles time
and crashes; `requests.py` knows neither. `channels/` notifies approvers. `model.py` has the values,
`store.py` the state changes and their SQL. Invariant: every state change is one transaction, and
nothing acts on a state before that transaction is durable.
"""
