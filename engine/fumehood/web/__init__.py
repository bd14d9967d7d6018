"""The web console: pages in a browser on this machine, in front of the daemon's control socket.

The console is a separate process (`fumehood web`, or a child of `fumehood serve --web`) between
browsers and the engine, which it reaches with the asynchronous clients. The console has no
authority: every read and every decision carries the credential of the approver who logged in, and
the engine decides. Invariants: every response to a browser has the headers of `guard.py`; every
request that changes anything is a POST with the login's token; no text from an agent, a tool or a
file reaches a page unescaped (`text.py`). `view.py` explains how to add a page.
"""
