"""The policy: rules that allow calls, deny calls, or require a human's approval for them (ask).

Host side. `loader.py` reads the operator's policy file into the values of `model.py`. `rules.py`
evaluates each rule, and `service.py` combines the results to a decision. Deny wins over ask, and
ask wins over allow.
"""
