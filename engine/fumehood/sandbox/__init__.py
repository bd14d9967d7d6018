"""The host side of the sandbox: walls, leases, and the sessions that hold leases.

`wall.py` defines the interfaces of a wall. `process/`, `container/` and `cluster/` implement them.
`images/` describes the container images, and `guest/` contains the code
that runs inside a sandbox.
"""
