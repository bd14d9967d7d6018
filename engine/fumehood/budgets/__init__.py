"""Budgets and rate limits: limits on spending and on how often tools run, and usage reports.

Host side. `ledger.py` reserves before a call runs and settles afterwards; `limiter.py` decides when
a call may start; `store.py` has the counters of both, `usage.py` the sums of past calls. Invariant:
a crash can make a budget smaller, never larger.
"""
