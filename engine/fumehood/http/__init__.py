"""The daemon: HTTP/1.1 and JSON on two private Unix sockets, one for calls, one for control.

Host side. `server.py` runs the daemon, and `app.py` maps addresses to the operations in `routes/`.
"""
