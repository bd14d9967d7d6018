"""The names of all node classes of this Python's syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def _classes(root: type) -> Iterator[type]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


NODE_CLASSES = sorted({c.__name__ for c in _classes(ast.AST) if c.__module__ in ("ast", "_ast")})
