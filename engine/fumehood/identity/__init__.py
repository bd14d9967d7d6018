"""Identity: principals, credentials, tokens, approvers, and the registry of agents.

Host side. This package determines the caller of a call, its agent, and the agent's tools. Secrets
are stored as hashes only (`credential_hashes.py`).
"""
