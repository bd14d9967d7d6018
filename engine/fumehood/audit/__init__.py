"""The audit chain: rows that cannot be changed, removed or reordered unnoticed.

Host side. `chain.py` appends rows in the transaction of the change they record, `keys.py` holds
the keys outside the database, and `verify.py` checks a chain with the standard library alone.
Beside `storage`, because the database and the chain write in the same transaction.
"""
