"""The interpreter: expressions and restricted programs, in processes that a filter locks.

A part: its wall, with sticky workers, and the executors `expression` and `restricted_python`. The
guest's side is `guest/interpreter/`.
"""
