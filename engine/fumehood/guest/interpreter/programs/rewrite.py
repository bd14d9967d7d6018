"""What a program is freed from before the tables look at it.

Guest side. Annotations are read and forgotten, so that none is ever evaluated; a bare
`except:` becomes `except Exception:`, so that it cannot catch the sandbox's own reasons.
Iterative. Invariant: nothing is added that the tables would not let through.
"""

from __future__ import annotations

import ast

_FUTURE_IGNORED = frozenset({"annotations"})


def simplify(tree: ast.Module) -> ast.Module:
    """The same program without annotations, `from __future__` and bare `except:`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            node.type = ast.copy_location(ast.Name("Exception", ast.Load()), node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [_statement(statement) for statement in block])
    return tree


def _statement(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.AnnAssign):
        if statement.value is None:
            return ast.copy_location(ast.Pass(), statement)
        plain = ast.Assign(targets=[statement.target], value=statement.value)
        return ast.copy_location(plain, statement)
    if (
        isinstance(statement, ast.ImportFrom)
        and statement.module == "__future__"
        and {alias.name for alias in statement.names} <= _FUTURE_IGNORED
    ):
        return ast.copy_location(ast.Pass(), statement)
    return statement
