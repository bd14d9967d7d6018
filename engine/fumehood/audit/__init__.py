"""The audit chain as a service: anchors, verification and rotation of its key.

Host side. `storage/audit_chain` appends rows in the transaction of the change that they record,
`storage/audit_keys` keeps the keys outside the database, and `protocol/audit_verify` checks a chain
using only the standard library.
"""
