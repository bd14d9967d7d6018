"""The synchronous twin of `async_client.py`, which scripts/make_clients.py generates."""
