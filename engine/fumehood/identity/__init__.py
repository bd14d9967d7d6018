"""Identity: principals, credentials, tokens, approvers, and the registry of agents.

Host side. It decides who is calling, for which agent, and with which tools. `credentials.py` hashes
tokens and approvers' credentials, `store.py` has the SQL; secrets are stored as hashes only.
"""
