"""The keyword arguments of the public methods are those of the models they stand for."""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from fumehood import AsyncClient, AsyncControlClient, Client, ControlClient, Engine
from fumehood.approvals.model import ApprovalQuery, ApprovalState
from fumehood.budgets.model import AllUsageQuery, UsageQuery
from fumehood.client.sync.approvals import ControlledApprovals
from fumehood.core import keywords
from fumehood.core.call import CallOptions
from fumehood.core.call_log import CallQuery
from fumehood.core.tool import ToolDefinition

PAIRS = [
    (keywords.CallKeywords, CallOptions, set()),
    (keywords.CallQueryKeywords, CallQuery, set()),
    (keywords.UsageKeywords, UsageQuery, {"by"}),
    (keywords.AllUsageKeywords, AllUsageQuery, {"by"}),
    (keywords.ApprovalQueryKeywords, ApprovalQuery, set()),
]
TEXT_TOO = {datetime | None: datetime | str | None, ApprovalState | None: str | None}
"""What a program may also write as text."""


@pytest.mark.parametrize(("kind", "model", "apart"), PAIRS)
def test_keywords_are_the_models_fields_with_their_types(
    kind: type, model: type[BaseModel], apart: set[str]
) -> None:
    hints = get_type_hints(kind)
    assert set(hints) == set(model.model_fields) - apart
    of_model = get_type_hints(model)
    for name, hint in hints.items():
        assert hint == TEXT_TOO.get(of_model[name], of_model[name]), name


def test_keywords_of_the_decorator_are_the_fields_of_a_definition() -> None:
    assert set(get_type_hints(keywords.ToolKeywords)) == set(ToolDefinition.model_fields)


def test_names_that_are_known_come_back_with_their_values() -> None:
    given: dict[str, Any] = {"timeout_seconds": 1, "dry_run": True}
    assert keywords.checked(keywords.CallKeywords, "call", given) == given
    assert keywords.checked(keywords.CallKeywords, "call", {}) == {}


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("timeout", "timeout_seconds"),
        ("memory_limit", "memory_limit_mb"),
        ("dryrun", "dry_run"),
        ("session", "session_id"),
    ],
)
def test_misspelt_name_is_refused_with_the_nearest_one(wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"call\(\) .*'{wrong}'.* Did you mean '{meant}'\?"):
        keywords.checked(keywords.CallKeywords, "call", {wrong: 1})


def test_name_that_is_like_none_is_refused_with_all_of_them() -> None:
    with pytest.raises(TypeError, match="It takes category, tag, type"):
        keywords.checked(keywords.ToolFilterKeywords, "tools", {"qqq": 1})


def test_names_of_the_base_are_known_too() -> None:
    for kind, name in (
        (keywords.ToolPageKeywords, "category"),
        (keywords.AllUsageKeywords, "since"),
    ):
        assert keywords.checked(kind, "method", {name: "x"}) == {name: "x"}


METHODS = [
    (Client.call, keywords.CallKeywords, ["self", "tool", "arguments"]),
    (AsyncClient.stream, keywords.CallKeywords, ["self", "tool", "arguments"]),
    (Engine.call, keywords.CallKeywords, ["self", "tool", "arguments"]),
    (Engine.calls, keywords.CallQueryKeywords, ["self"]),
    (ControlClient.usage, keywords.AllUsageKeywords, ["self", "by"]),
    (ControlledApprovals.list, keywords.ApprovalQueryKeywords, ["self"]),
]


@pytest.mark.parametrize(("method", "kind", "others"), METHODS)
def test_signature_of_a_method_names_its_keywords(
    method: Any, kind: type, others: list[str]
) -> None:
    signature = inspect.signature(method)
    hints = get_type_hints(kind)
    assert list(signature.parameters) == [*others, *hints]
    for name, hint in hints.items():
        parameter = signature.parameters[name]
        assert (parameter.kind, parameter.annotation) == (parameter.KEYWORD_ONLY, hint)
        assert str(parameter).endswith(" = ...")  # it may be left out


def test_no_method_of_the_public_classes_hides_its_keywords() -> None:
    classes = (AsyncClient, AsyncControlClient, Client, ControlClient, Engine)
    named = [method for cls in classes for _, method in inspect.getmembers(cls, inspect.isfunction)]
    assert len(named) > 100
    for method in named:
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, method
