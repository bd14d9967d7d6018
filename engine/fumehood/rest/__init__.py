"""REST services, a part: tools that are requests, `fetch_url`, and OpenAPI documents.

Host side. `executor.py` sends one request for each call, and `fetch.py` reads a page. Both use the
kernel's `executors/upstreams.py`, which decides which addresses can be reached. `openapi.py` makes
definitions for `fumehood tools import openapi`.
"""
