"""Budgets: limits on calls, tokens and money, the ledger that counts them, and usage reports.

Host side. `ledger.py` reserves before a call runs and settles afterwards; `store.py` and
`usage.py` are the SQL. Invariant: a crash can make a budget smaller, never larger.
"""
