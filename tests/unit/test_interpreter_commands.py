"""Every interpreter that the product starts is told not to import from the current directory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for part in ("engine", "builtin_tools", "scripts") for path in (ROOT / part).rglob("*.py")
)
SAFE = {"-I", "-P"}


def unsafe_commands(source: str) -> Iterator[int]:
    """The lines of commands that start an interpreter without `-I` or `-P` as its first option.

    A command is a list or tuple that begins with an interpreter, or that has `-m` or `-c` and does
    not begin with a shell.
    """
    tree = ast.parse(source)
    iterated = {id(node.iter) for node in ast.walk(tree) if isinstance(node, ast.For)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.List | ast.Tuple) or id(node) in iterated or not node.elts:
            continue
        words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
        first = words[0]
        is_shell = isinstance(first, str) and first.endswith("sh")
        is_python = ast.unparse(node.elts[0]).endswith(("sys.executable", "/python3'"))
        if (is_python or ({"-m", "-c"} & set(words) and not is_shell)) and (
            len(words) < 2 or words[1] not in SAFE
        ):
            yield node.lineno


def test_interpreters_are_started_with_isolation_flags() -> None:
    unsafe = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        for line in unsafe_commands(path.read_text(encoding="utf-8"))
    ]
    assert unsafe == []
    assert len(FILES) > 300


@pytest.mark.parametrize(
    ("source", "is_safe"),
    [
        ('[sys.executable, "-m", "fumehood.web", port]', False),
        ('[sys.executable, program, "serve"]', False),
        ('[sys.executable]', False),
        ('[*python, "-m", "pip"]', False),
        ('(found(), "-c", "import pip")', False),
        ('module = ["-m", "fumehood.web"]', False),
        ('["/usr/bin/python3", "-c", "1"]', False),
        ('[sys.executable, "-P", "-m", "fumehood.web", port]', True),
        ('[python, "-I", "-S", "-c", "1"]', True),
        ('["/bin/sh", "-c", script]', True),
        ('["-P", "-I"]', True),
    ],
)  # fmt: skip
def test_control_checker_detects_unsafe_commands(source: str, is_safe: bool) -> None:
    assert (not list(unsafe_commands(source))) == is_safe
