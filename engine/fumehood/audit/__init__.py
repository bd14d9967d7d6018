"""Detects tampering with the audit chain: anchors and verifies the chain, and rotates its key.

Host side. The chain itself does not depend on this part: `storage/audit_chain` appends each row in
the transaction of the change that it records, and `storage/audit_keys` keeps the keys outside the
database. `verify.py` checks a chain using only the standard library.
"""
