"""The host side of the sandbox: walls, leases, and the sessions that hold them.

`wall.py` defines the interfaces of a wall. `process/`, `container/` and `cluster/` implement them,
`images/` builds the container images, and `guest/` contains the code that runs inside a sandbox.
"""
