"""The types of the stages are made by their own stage only, so no gate can be skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    "AdmittedCall": "pipeline/admit.py",
}


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ENGINE.rglob("*.py")):
        yield path.relative_to(ENGINE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


TREES = dict(_trees())


def _makers(name: str) -> set[str]:
    """The files in which a value of this type is made, under whatever import."""
    return {
        path
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    }


def test_the_whole_engine_was_read() -> None:
    assert len(TREES) > 60
    assert set(STAGES.values()) <= TREES.keys()


@pytest.mark.row("P2", "A1")
@pytest.mark.parametrize("name", STAGES)
def test_value_of_a_stage_is_made_in_its_own_file_only(name: str) -> None:
    assert _makers(name) == {STAGES[name]}


@pytest.mark.parametrize("name", STAGES)
def test_no_stage_type_has_a_second_name(name: str) -> None:
    renamed = [
        path
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.alias) and node.name == name and node.asname not in (None, name)
    ]
    assert renamed == []


def test_values_of_stages_are_never_changed_into_others() -> None:
    changed = [
        path
        for path, tree in TREES.items()
        if path.startswith("call/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("replace", "dataclasses.replace")
    ]
    # `shape` turns an outcome into a failed one; nothing else is copied.
    assert set(changed) <= {"pipeline/result.py"}


def test_execute_takes_what_only_admit_makes() -> None:
    execute = next(
        node
        for node in ast.walk(TREES["pipeline/execute.py"])
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "execute"
    )
    assert [ast.unparse(argument.annotation or execute) for argument in execute.args.args] == [
        "AdmittedCall"
    ]
