"""The host side of the sandbox: walls, leases, and the sessions that hold them.

`wall.py` defines a wall. `process/` and `container/` implement walls, `images/` builds what
containers start from, and the code on the inside is in `guest/`.
"""
