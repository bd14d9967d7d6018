"""Approvals: calls that wait for a human, from the question to the run after the approval.

Host side. `requests.py` is what the pipeline uses: a call asks, waits, starts and ends. Above the
pipeline, `service.py` is what people use, `scheduler.py` handles time and crashes, and `resume.py`
runs approved calls; none of them is known to `requests.py`. `channels/` tells people. `model.py`
and `states.py` are values, `store.py` is the SQL. Invariant: every change of state is one
transaction, and nothing acts on a state before that transaction is durable.
"""
