"""Identity: principals, credentials, tokens, approvers, and the registry of agents.

Host side. It answers who is asking, for which agent, and with which tools. `store.py` and
`agent_store.py` are the SQL; secrets are stored as hashes only.
"""
