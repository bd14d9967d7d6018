"""RestrictedPython's policy, the second opinion after our tables.

Guest side. Its transformer turns attribute access, subscripts, printing, unpacking and
augmented assignment into calls of guards, and refuses by itself what it does not know. It
is used unchanged except where the methods below widen it; each says why that is safe.
Invariant: `nodes.check` has let the tree through before.
"""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

from RestrictedPython.compile import compile_restricted_exec
from RestrictedPython.transformer import (
    IOPERATOR_TO_STR,
    RestrictingNodeTransformer,
    copy_locations,
)

from fumehood.guest.interpreter.programs.nodes import MAGIC_METHODS
from fumehood.guest.interpreter.programs.refusal import Refused

FILENAME = "<code>"
VALUE = "_value_"
"""Where the value of the last expression is kept; no program can write this name."""

MAX_REASONS = 5


def compile_program(tree: ast.Module) -> CodeType:
    """Code that reaches everything through guards.

    Raises:
        Refused: RestrictedPython refused it.
        SyntaxError: Python's compiler did.
    """
    result = compile_restricted_exec(tree, filename=FILENAME, policy=ProgramPolicy)
    if result.code is None:
        raise Refused("; ".join(result.errors[:MAX_REASONS]) or "RestrictedPython refused it")
    return result.code


class ProgramPolicy(RestrictingNodeTransformer):
    """The stock policy with the widenings of this language."""

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        """More methods than the stock eight: our table names them and their positions."""
        if allow_magic_methods and isinstance(node, ast.FunctionDef) and name in MAGIC_METHODS:
            return
        super().check_name(node, name, allow_magic_methods)

    def visit_Module(self, node: ast.Module) -> Any:
        """Keep the value of a last expression, under a name that only we can write."""
        visited: ast.Module = super().visit_Module(node)  # type: ignore[assignment]
        last = visited.body[-1] if visited.body else None
        if isinstance(last, ast.Expr):
            kept = ast.Assign(targets=[ast.Name(VALUE, ast.Store())], value=last.value)
            copy_locations(kept, last)
            visited.body[-1] = kept
        return visited

    def visit_Name(self, node: ast.Name) -> Any:
        """`__name__` is a constant here, not a module's."""
        if node.id == "__name__" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant("__main__"), node)
        return super().visit_Name(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Two underscored attributes, read through guards that know only them."""
        guard = {"__name__": "_name_of_", "__init__": "_super_init_"}.get(node.attr)
        if guard is None or not isinstance(node.ctx, ast.Load):
            return super().visit_Attribute(node)
        return _guarded(node, guard, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Items and attributes too: read, computed and written through the same guards."""
        target, operation = node.target, ast.Constant(IOPERATOR_TO_STR[type(node.op)])
        if isinstance(target, ast.Name):
            return super().visit_AugAssign(node)
        where: ast.expr
        if isinstance(target, ast.Subscript):
            guard, where = "_inplace_item_", self.visit(target.slice)
        else:
            guard, where = "_inplace_attribute_", ast.Constant(target.attr)
        call = _guarded(
            node, guard, operation, self.visit(target.value), where, self.visit(node.value)
        )
        statement = ast.Expr(call)
        copy_locations(statement, node)
        return statement

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        """Binds names of enclosing functions, all of which the name check has seen."""
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Unchanged, with the class's real position for tracebacks."""
        visited: ast.ClassDef = super().visit_ClassDef(node)  # type: ignore[assignment]
        copy_locations(visited, node)
        for keyword in visited.keywords:
            ast.copy_location(keyword, node)
            ast.copy_location(keyword.value, node)
        return visited


def _guarded(node: Any, guard: str, *arguments: ast.expr) -> ast.Call:
    call = ast.Call(func=ast.Name(guard, ast.Load()), args=list(arguments), keywords=[])
    copy_locations(call, node)
    return call
