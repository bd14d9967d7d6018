"""The guest: everything that runs inside a wall. It is started by its path and never imported.

Standard library only, but for `interpreter/`. `process/` and `container/` each have a supervisor,
which is where to start reading, and share `core/`.
"""
