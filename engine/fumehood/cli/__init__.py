"""The command line: one file for each group of commands.

JSON goes to stdout, messages to stderr. `main.py` imports a command's module only when the command
is used.
"""
