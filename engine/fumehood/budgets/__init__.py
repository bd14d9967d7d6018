"""Budgets and rate limits (a part): limits on spending, and on how often tools run.

Host side. The modules:

* `ledger.py` reserves a call's expected cost in the budgets before the call runs, and replaces it
  by the actual cost afterwards.
* `limiter.py` decides when a call may start.
* `store.py` stores the counters of budgets and rate limits.
* `gates.py` connects both to the pipeline.

Invariant: a crash can reduce the remaining amount of a budget, but never increase it.
"""
