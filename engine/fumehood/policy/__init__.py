"""The policy: rules that allow, ask about or deny calls.

Host side. `loader.py` reads the operator's file into the values of `model.py`, `rules.py` evaluates
them, and `service.py` decides. Deny wins over ask, and ask over allow.
"""
