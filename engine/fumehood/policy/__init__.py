"""The policy: rules that allow, ask or deny a call.

Host side. `loader.py` reads the operator's file into the values of `model.py`, `predicates.py` and
`rules.py` evaluate them, and `service.py` decides. Deny wins over ask, and ask over allow.
"""
