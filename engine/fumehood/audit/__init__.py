"""The audit chain: rows that cannot be changed, removed or reordered unnoticed.

Host side. `chain.py` appends rows in the transaction of the change that they record, `keys.py`
keeps the keys outside the database, and `verify.py` checks a chain using only the standard library.
This package and `storage` are on the same level, because the database and the chain write in the
same transaction.
"""
