"""The host side of the sandbox: walls, leases, and the sessions that hold them.

`wall.py` defines the interfaces of a wall. `process/` and `container/` implement them, `images/`
builds the images of containers, and `guest/` has the code that runs inside a sandbox.
"""
