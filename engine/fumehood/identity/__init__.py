"""Identity: principals, credentials, tokens, approvers, and the registry of agents.

Host side. For each call, this package determines the principal that makes the call, the agent that
the call is made for, and that agent's tools. Secrets are stored only as hashes
(`credential_hashes.py`).
"""
