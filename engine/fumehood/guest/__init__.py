"""The guest: everything that runs inside a wall. Found by path, imported by nobody.

Standard library only, but for `interpreter/`. The same program stands behind every wall;
`supervisor` is where to start reading.
"""
