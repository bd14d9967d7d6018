"""Approvals: calls that wait for a human, from the question to the run after the approval.

Host side. `requests.py` is what the pipeline uses: a call asks, waits, starts and ends. Above the
pipeline, `service.py` is what people use, `scheduler.py` runs approved calls and handles time and
crashes; neither is known to `requests.py`. `channels/` tells people. `model.py` has the values,
`store.py` the changes of state and their SQL. Invariant: every change of state is one transaction,
and nothing acts on a state before that transaction is durable.
"""
