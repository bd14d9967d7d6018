"""The programs that shell commands run, for rules of the policy: the condition `runs`.

Host side. `condition.py` is the condition, `reading.py` reads a call's command, `syntax.py` the
text, and `runners.py` has the tables of programs that run others.
"""
