"""The arguments and results of the interpreter's executors.

This module contains only values. The program in the guest checks its arguments itself; the
executors check the form of the program's results.
"""

from __future__ import annotations

from pydantic import Field

from fumehood.core.arguments import Arguments
from fumehood.core.json_types import JsonObject

EXPRESSION_OUTPUT: JsonObject = {
    "type": "object",
    "required": ["value", "text"],
    "properties": {
        "value": {
            "description": "The result; null for integers beyond 2**53 - 1, see text.",
            "type": ["number", "boolean", "array", "null"],
        },
        "text": {"type": "string", "description": "The result, exact."},
    },
}
"""Output schema of tools with the executor `expression`, which checks its results itself."""

PROGRAM_OUTPUT: JsonObject = {
    "type": "object",
    "required": ["value", "value_repr", "stdout"],
    "properties": {
        "value": {
            "description": "The value of the last expression; null where JSON cannot hold it.",
        },
        "value_repr": {
            "type": ["string", "null"],
            "description": "The same as Python shows it, cut where it is long.",
        },
        "stdout": {"type": "string", "description": "What the program printed."},
    },
}
"""Output schema of tools with the executor `restricted_python`, which checks its results itself."""


class ExpressionArguments(Arguments):
    source = "expression"
    is_checked_here = False

    expression: str = Field(
        min_length=1,
        max_length=32_768,
        description="The expression, for example 'sqrt(2) * 3' or '5! + 2**10'.",
    )
    precision: int | None = Field(
        None,
        ge=0,
        le=15,
        description="Round decimals half-even to this many places; absent: not at all.",
    )


class RestrictedPythonArguments(Arguments):
    source = "code"
    is_checked_here = False

    code: str = Field(
        max_length=65_536, description="The program. Print results, or end with an expression."
    )
