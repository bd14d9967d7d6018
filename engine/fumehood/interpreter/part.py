"""Declaration of the part `interpreter`: a wall for expressions and short programs."""

from __future__ import annotations

from fumehood.core.part import Check, Part, ToolKind

PLACE, WHY = "interpreter", "Small programs run in a locked process without network or files."

PART = Part(
    name="interpreter",
    settings="fumehood.interpreter.settings:SETTINGS",
    libraries={"asteval": "1.0.10", "RestrictedPython": "8.4"},
    checks=(
        Check(
            "interpreter:", "fumehood.interpreter.doctor:check", after="Authority", group="Limits"
        ),
    ),
    executors={
        "expression": ToolKind(
            executor="fumehood.interpreter.executors:ExpressionExecutor",
            arguments="fumehood.interpreter.schemas:ExpressionArguments",
            output="fumehood.interpreter.schemas:EXPRESSION_OUTPUT",
            place=PLACE,
            why=WHY,
        ),
        "restricted_python": ToolKind(
            executor="fumehood.interpreter.executors:RestrictedPythonExecutor",
            arguments="fumehood.interpreter.schemas:RestrictedPythonArguments",
            output="fumehood.interpreter.schemas:PROGRAM_OUTPUT",
            place=PLACE,
            why=WHY,
        ),
    },
    in_engine="fumehood.interpreter.in_engine:Interpreter",
)
