"""The types of the stages are made by their own stage only, so no gate can be skipped."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import fumehood

ENGINE = Path(fumehood.__file__).parent
STAGES = {
    "ResolvedCall": "pipeline/resolve.py",
    "ValidatedCall": "pipeline/validate.py",
    "PermittedCall": "pipeline/authorize.py",
    "ClaimedCall": "pipeline/claim.py",
    "ApprovedCall": "pipeline/approve.py",
    "AdmittedCall": "pipeline/execute.py",
}
VALUES = frozenset(name.removesuffix("Call").lower() for name in STAGES)
"""The variables that hold values of stages."""


@cache
def _trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(ENGINE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(ENGINE.rglob("*.py"))
    }


@cache
def _uses() -> tuple[dict[str, set[str]], set[tuple[str, str]], set[str]]:
    """The files in which each name is called, all imports under a second name, and the files that
    copy a stage's value."""
    makers = defaultdict[str, set[str]](set)
    renamed, copied = set[tuple[str, str]](), set[str]()
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.alias) and node.asname not in (None, node.name):
                renamed.add((path, node.name))
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            makers[name].add(path)
            if name == "replace" and node.args and ast.unparse(node.args[0]) in VALUES:
                copied.add(path)
    return makers, renamed, copied


def test_gate_check_covers_the_whole_engine() -> None:
    assert len(_trees()) > 60
    assert set(STAGES.values()) <= _trees().keys()


@pytest.mark.row("P2", "A1")
@pytest.mark.parametrize("name", STAGES)
def test_stage_value_is_created_only_in_its_own_module(name: str) -> None:
    assert _uses()[0][name] == {STAGES[name]}


@pytest.mark.parametrize("name", STAGES)
def test_stage_types_are_not_aliased(name: str) -> None:
    assert [path for path, other in _uses()[1] if other == name] == []


def test_stage_values_are_never_copied_with_changes() -> None:
    assert _uses()[2] == set()


def test_execute_takes_only_admitted_calls() -> None:
    execute = next(
        node
        for node in ast.walk(_trees()["pipeline/execute.py"])
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "execute"
    )
    assert [ast.unparse(argument.annotation or execute) for argument in execute.args.args] == [
        "AdmittedCall"
    ]
