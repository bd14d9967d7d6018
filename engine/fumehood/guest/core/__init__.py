"""Code shared by the guests of all walls: calls to the operating system, system-call filters,
limits, and rules for how a run ended.
"""
