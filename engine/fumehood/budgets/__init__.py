"""Budgets: what may be spent, what was spent, and the ledger between them."""
