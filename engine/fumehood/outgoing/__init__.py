"""Requests to other services (a part): the parts `rest`, `mcp` and `gateway` send them.

Host side. `upstreams.py` sends requests for tools and bounds the answers. `addresses.py` checks
every address before a connection is made, and `secret_values.py` removes the values of secrets from
answers.
"""
