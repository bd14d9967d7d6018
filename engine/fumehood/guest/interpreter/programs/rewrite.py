"""What a program is freed from before the tables look at it.

Guest side. Annotations are read and forgotten, so that none is ever evaluated; a bare
`except:` becomes `except Exception:`, so that it cannot catch the sandbox's own reasons.
Iterative. Invariant: nothing is added that the tables would not let through.
"""

from __future__ import annotations

import ast

_FUTURE_IGNORED = frozenset({"annotations"})


_BLOCKS = ("body", "orelse", "finalbody", "handlers")


def simplify(tree: ast.Module) -> ast.Module:
    """The same program without annotations, `from __future__` and bare `except:`.

    Walks statements only: no expression holds any of these.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for parameter in _parameters(node.args):
                parameter.annotation = None
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            node.type = ast.copy_location(ast.Name("Exception", ast.Load()), node)
        for name in _BLOCKS:
            block = getattr(node, name, None)
            if isinstance(block, list):
                statements = [_statement(statement) for statement in block]
                setattr(node, name, statements)
                waiting += statements
    return tree


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return named + [rest for rest in (arguments.vararg, arguments.kwarg) if rest is not None]


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
