"""The part that shows tampering: it anchors the audit chain, verifies it and rotates its key.

Host side. `storage/audit_chain` appends rows in the transaction of the change that they record, and
`storage/audit_keys` keeps the keys outside the database, also without this part. `verify.py` checks
a chain using only the standard library.
"""
