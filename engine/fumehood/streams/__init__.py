"""Streams (a part): the events of a call while it runs, kept for some time after it has ended.

`in_engine.py` starts followed calls (`call.py`), and keeps their events in files (`recordings.py`).
`routes.py` sends the events as server-sent events (`sse.py`). The clients follow the events
(`async_client.py`, `resuming.py`), even if their connection breaks. Invariants: events stay in
order, and each gap is marked by an event; events belong to the principal that made the call; a call
never waits for its followers.
"""
