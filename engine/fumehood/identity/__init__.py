"""Identity: principals, credentials, tokens, approvers, and the registry of agents.

Host side. It decides who is calling, for which agent, and with which tools. `store.py` has the SQL.
Secrets are stored as hashes only (`credential_hashes.py`).
"""
