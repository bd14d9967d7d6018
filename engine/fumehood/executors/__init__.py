"""How a tool runs: one executor for each kind of tool.

Host side, below `pipeline/execute.py` and above the walls. Each executor takes a lease and
arguments, and returns an `Outcome`.
"""
