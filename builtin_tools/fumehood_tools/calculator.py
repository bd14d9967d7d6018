"""`calculator`: exact arithmetic for models, which are bad at it.

Only the definition stands here. It is evaluated behind the interpreter wall, by the
guest's own program for the executor `expression`.
"""

from fumehood import EXPRESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

calculator = ToolDefinition(
    name="calculator",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Calculate one mathematical expression exactly. Reads nothing and changes nothing. "
        "Use it for every calculation with more than one digit. It knows + - * / // % **, "
        "postfix ! for factorials, comparisons, if/else, and the functions of Python's math "
        "module such as sqrt, sin, log, comb, gcd, and round, min, max, sum. Not for text, "
        "dates, units or programs. Power is **, not ^; 5 percent of x is x * 5 / 100."
    ),
    parameters=argument_schema("expression"),
    output_schema=EXPRESSION_OUTPUT,
    input_examples=({"expression": "5! + 2**10"}, {"expression": "1 / 3", "precision": 4}),
    category="calculation",
    tags=("math",),
    executor="expression",
    read_only=True,
    estimated_tokens=40,
)
