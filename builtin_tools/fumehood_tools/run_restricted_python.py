"""`run_restricted_python`: a small program for models that need more than one expression.

Only the definition stands here. It runs behind the interpreter wall, by the guest's own
program for the executor `restricted_python`, in a process made for the call.
"""

from fumehood import PROGRAM_OUTPUT, ToolDefinition, ToolType, argument_schema

run_restricted_python = ToolDefinition(
    name="run_restricted_python",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Run a small Python program without files, network or other side effects, and get what "
        "it printed and the value of its last expression. Reads nothing and changes nothing; "
        "nothing is kept for the next call. Use it for calculations with loops, functions and "
        "classes, for text, dates, sorting, counting and JSON. It may import bisect, "
        "collections, copy, datetime, decimal, fractions, functools, heapq, itertools, json, "
        "math, operator, random, re, statistics, string, textwrap and typing. Not for NumPy, "
        "files, input or the network, and not with names that begin with an underscore, with, "
        "match, async, eval, getattr or str.format (use f-strings)."
    ),
    parameters=argument_schema("restricted_python"),
    output_schema=PROGRAM_OUTPUT,
    input_examples=(
        {"code": "total = 0\nfor n in range(1, 101):\n    total += n * n\ntotal"},
        {"code": "from collections import Counter\nCounter('banana').most_common(2)"},
    ),
    category="calculation",
    tags=("python", "code"),
    executor="restricted_python",
    read_only=True,
    estimated_tokens=200,
)
