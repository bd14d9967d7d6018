"""REST services (a part): tools that send HTTP requests, `fetch_url`, and tools made from OpenAPI
documents.

Host side. `executor.py` sends one request for each call of a REST tool. `fetch.py` fetches a page
for `fetch_url`. Both use the part `outgoing`, which decides which addresses they can reach.
`openapi.py` makes tool definitions for `fumehood tools import openapi`.
"""
