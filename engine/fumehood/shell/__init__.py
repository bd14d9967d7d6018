"""The policy condition `runs`, which tests the programs that a call's shell command runs.

Host side. `condition.py` defines the condition, `reading.py` finds the programs of a command,
`syntax.py` parses the command's text, and `runners.py` lists programs that run other programs.
"""
