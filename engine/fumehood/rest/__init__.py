"""REST services (a part): tools that send requests, `fetch_url`, and the import of OpenAPI
documents.

Host side. `executor.py` sends one request for each call of a REST tool, and `fetch.py` fetches a
page for `fetch_url`. Both use the part `outgoing`, which determines the addresses that can be
reached. `openapi.py` makes tool definitions for `fumehood tools import openapi`.
"""
