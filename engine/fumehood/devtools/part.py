"""Declaration of the part `devtools`: checks of tool definitions and recorded calls for their
authors.
"""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="devtools",
    after=("rest",),  # whose group `tools import` precedes `tools golden`
    commands={
        "tools lint": Command(
            "Review definitions by the rules for tools that models use.",
            "fumehood.devtools.command:lint_tools",
            after="disable",
        ),
        "tools compat": Command(
            "Show which callers a new version of a definition breaks, and the version it needs.\n\n"
            "Exit code 1: the new version's number promises more than it keeps.",
            "fumehood.devtools.command:compare_tools",
            after="lint",
        ),
        "tools golden": Command(
            "Sequences of calls with recorded answers.",
            "fumehood.devtools.command:golden",
            after="import",
        ),
    },
)
