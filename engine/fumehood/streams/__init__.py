"""Streams, a part: the events of a call while it runs, kept for a while after it has ended.

`in_engine.py` starts followed calls (`call.py`), and keeps their events in files (`recordings.py`).
`routes.py` sends them, as server-sent events (`sse.py`), and the clients follow them
(`async_client.py`, `resuming.py`), also after their connection broke. Invariants: events keep
their order, and an event marks each gap; events belong to the principal that made the call; a call
never waits for its followers.
"""
