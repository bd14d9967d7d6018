"""The guest: everything that runs inside a wall. It is started by its path and never imported.

It uses only the standard library, except in `interpreter/`. `process/` and `container/` share
`core/`. Start reading at their `supervisor.py`.
"""
