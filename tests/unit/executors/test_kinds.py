"""The table of executors, to which parts add theirs."""

from __future__ import annotations

import pytest

from fumehood.core.part import Part, PartError, ToolKind
from fumehood.executors.kinds import with_parts
from fumehood.interpreter.executors import ExpressionExecutor

OWN = {"expression": ExpressionExecutor()}


def kind(type: str | None = None) -> ToolKind:  # noqa: A002 - the field's name
    return ToolKind(
        executor="fumehood.interpreter.executors:ExpressionExecutor", type=type,
        place="there", why="It is there.",
    )  # fmt: skip


def add(monkeypatch: pytest.MonkeyPatch, **added: ToolKind) -> None:
    monkeypatch.setattr("fumehood.parts.parts", lambda: (Part(name="a", executors=added),))


def test_executor_of_a_part_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, mail=kind("MCP"), post=kind())
    made = with_parts(OWN)
    assert made.keys() == {"expression", "mail", "post"}
    assert made["expression"] is OWN["expression"]
    assert isinstance(made["mail"], ExpressionExecutor)


@pytest.mark.parametrize(
    "added",
    [
        {"expression": kind()},
        {"mail": kind("NATIVE")},
        {"mail": kind("BUILTIN")},
        {"mail": kind("REST"), "post": kind("REST")},
        {"mail": kind("MCP"), "post": kind("MCP")},
    ],
)
def test_part_cannot_replace_an_executor_or_a_type(
    monkeypatch: pytest.MonkeyPatch, added: dict[str, ToolKind]
) -> None:
    add(monkeypatch, **added)
    with pytest.raises(PartError, match="it or its type already exists"):
        with_parts(OWN)
