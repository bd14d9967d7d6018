"""The audit chain: rows that nobody can change, remove or reorder unseen."""
