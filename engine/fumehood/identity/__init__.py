"""Identity: principals, credentials, tokens, approvers, and the registry of agents.

Host side. It determines the caller, its agent, and the agent's tools. Secrets are stored as hashes
only (`credential_hashes.py`).
"""
