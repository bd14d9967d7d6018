"""The interpreter runs expressions and restricted programs in processes behind a system-call
filter.

This part contains the interpreter's wall, with sticky workers, and the executors `expression` and
`restricted_python`. The code that runs in the guest is in `guest/interpreter/`.
"""
