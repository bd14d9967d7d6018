"""Tool definitions: every field and default of the mission, and what each field refuses."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise, product
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.tool import ToolDefinition, ToolType

LEAST = {"name": "look_up", "description": "Look something up."}

# Field → its default, from mission T1 to T5, P7 and T6.
MISSION_DEFAULTS: dict[str, Any] = {
    "id": "look_up@1.0.0",
    "name": "look_up",
    "version": "1.0.0",
    "type": ToolType.NATIVE,
    "description": "Look something up.",
    "parameters": {"type": "object", "properties": {}},
    "output_schema": None,
    "input_examples": (),
    "category": None,
    "tags": (),
    "documentation_url": None,
    "requires_auth": False,
    "rate_limit": None,
    "timeout_seconds": None,
    "memory_limit_mb": None,
    "sandboxed": True,
    "dangerous": False,
    "cost_per_use": Decimal(0),
    "read_only": False,
    "idempotent": False,
    "strict": False,
    "cacheable": False,
    "cache_ttl": None,
    "cache_key_params": None,
    "streaming": False,
    "estimated_tokens": None,
    "deprecated": False,
    "sunset_date": None,
    "replacement": None,
    "migration_guide": None,
    "changelog": (),
    "endpoint": None,
    "method": None,
    "headers": None,
    "timeout": None,
    "retry_count": 0,
    "is_active": True,
    "fallback": None,
    "executor": "function",
}


def make(**fields: Any) -> ToolDefinition:
    return ToolDefinition.model_validate({**LEAST, **fields})


@pytest.mark.row("T1", "T2", "T3", "T4")
def test_every_definition_field_has_its_documented_default() -> None:
    assert make().model_dump() == MISSION_DEFAULTS


@pytest.mark.row("T1", "T6")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(
            ["name"], ["a", "_", "A", "_a", "a-b", "a_b", "a1", "get_Weather-2", "a" * 64, "__"]
        ),
        *product(
            ["version"],
            [
                "0.0.0",
                "1.0.0",
                "10.20.30",
                "1.0.0-alpha",
                "1.0.0-alpha.1",
                "1.0.0-0.3.7",
                "1.0.0-x-y-z.-",
                "1.0.0+build.1",
                "1.0.0-beta+exp.sha.5114f85",
                "1.0.0-0a",
                "1.0.0+001",
                "99999999999999999999.0.0",
            ],
        ),
        *product(
            ["executor"],
            [
                "expression",
                "restricted_python",
                "code:python",
                "code:c++",
                "workspace",
                "http",
                "mcp",
            ],
        ),
    ],
)
def test_documented_value_is_accepted(field: str, value: str) -> None:
    assert getattr(make(**{field: value}), field) == value


@pytest.mark.row("T4")
def test_versions_are_ordered_as_semver_orders_them() -> None:
    ordered = [
        "0.9.9",
        "1.0.0-1",
        "1.0.0-2",
        "1.0.0-10",
        "1.0.0-alpha",
        "1.0.0-alpha.1",
        "1.0.0-alpha.beta",
        "1.0.0-beta",
        "1.0.0-beta.2",
        "1.0.0-beta.11",
        "1.0.0-rc.1",
        "1.0.0",
        "1.0.1-0",
        "1.0.1",
        "1.2.0",
        "1.10.0",
        "2.0.0",
        "10.0.0",
    ]
    keys = [make(version=version).version_key for version in ordered]
    assert all(low < high for low, high in pairwise(keys))
    assert make(version="1.0.0+a").version_key == make(version="1.0.0+b").version_key


@pytest.mark.row("T2")
@pytest.mark.parametrize(
    ("fields", "idempotent"),
    [
        ({}, False),
        ({"read_only": True}, True),
        ({"read_only": False}, False),
        ({"read_only": True, "idempotent": False}, False),
        ({"idempotent": True}, True),
    ],
)
def test_idempotent_defaults_to_read_only(fields: dict[str, Any], idempotent: bool) -> None:
    assert make(**fields).idempotent is idempotent


def test_given_document_is_not_modified() -> None:
    document: dict[str, Any] = {**LEAST, "parameters": {"properties": {}}}
    ToolDefinition.model_validate(document)
    assert document == {**LEAST, "parameters": {"properties": {}}}


@pytest.mark.row("T6")
@pytest.mark.parametrize(
    ("kind", "executor"), [("NATIVE", "function"), ("REST", "http"), ("MCP", "mcp")]
)
def test_executor_defaults_by_type(kind: str, executor: str) -> None:
    assert make(type=kind).executor == executor


@pytest.mark.row("T6")
def test_builtin_tool_needs_an_executor() -> None:
    with pytest.raises(ValidationError, match="executor"):
        make(type="BUILTIN")


@pytest.mark.row("T2", "E3")
@pytest.mark.parametrize(
    ("given_money", "amount"),
    [
        ("0.01", Decimal("0.01")),
        (1, Decimal(1)),
        (0.1, Decimal("0.1")),
        (Decimal("0.000000001"), Decimal("0.000000001")),
        ("0", Decimal(0)),
    ],
)
def test_money_field_is_a_decimal_for_any_notation(given_money: Any, amount: Decimal) -> None:
    cost = make(cost_per_use=given_money).cost_per_use
    assert isinstance(cost, Decimal)
    assert cost == amount


NUMBER_FIELDS = ("cost_per_use", "timeout_seconds", "memory_limit_mb")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cost_per_use", "0.0000000001"),
        ("cost_per_use", "1e18"),
        ("timeout_seconds", 0),
        ("timeout_seconds", 86_401),
        ("memory_limit_mb", 0),
        ("memory_limit_mb", 1.5),
        ("memory_limit_mb", (1 << 20) + 1),
        ("rate_limit", 0),
        ("cache_ttl", 0),
        ("timeout", 0),
        ("retry_count", -1),
        ("retry_count", 11),
        ("description", ""),
        ("description", "d" * 10_001),
        ("type", "OTHER"),
        ("type", "native"),
        ("sunset_date", "soon"),
        ("sunset_date", "2026-02-30"),
        ("parameters", ["text"]),
        ("parameters", None),
        ("input_examples", ["text"]),
        ("tags", "math"),
        ("estimated_tokens", "many"),
        ("estimated_tokens", {"input": -1, "output": {"min": 0, "max": 1, "typical": 1}}),
        ("headers", {"a": 1}),
        ("colour", "red"),
        *product(
            ["name"],
            [
                "",
                "1a",
                "-a",
                "a b",
                "a.b",
                "a@1",
                "a/b",
                "é",
                "a" * 65,
                "a\n",
                "\na",
                "а",
                "ａ",
                None,
                5,
            ],
        ),
        *product(
            ["version"],
            [
                "",
                "1",
                "1.0",
                "1.0.0.0",
                "v1.0.0",
                "01.0.0",
                "1.00.0",
                "1.0.0-",
                "1.0.0-01",
                "1.0.0-a..b",
                "1.0.0+",
                "1.0.0+a+b",
                "1.0.0 ",
                "1.0.0\n",
                "1.٣.0",
                "1.1٣.0",
                "1٠.0.0",
                "latest",
                "1.0.0-" + "a" * 100,
                1.0,
                None,
            ],
        ),
        *product(NUMBER_FIELDS, [True, False, "many", -1, "NaN", float("nan"), float("inf")]),
    ],
)
def test_wrong_value_is_refused_under_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        make(**{field: value})


@pytest.mark.row("T1")
def test_definition_round_trips_through_json() -> None:
    full = make(
        version="1.2.3-rc.1+b",
        cost_per_use="0.012",
        sunset_date="2026-12-31",
        tags=["a", "b"],
        input_examples=[{"q": 1}],
        timeout_seconds=2.5,
        estimated_tokens={"input": 1, "output": {"min": 1, "max": 2, "typical": 1}},
        changelog=["1.2.3: better"],
    )
    assert ToolDefinition.model_validate_json(full.model_dump_json()) == full


@pytest.mark.row("T6")
def test_model_view_of_a_tool_hides_how_it_runs() -> None:
    shown = make(
        parameters={"properties": {"a": {"type": "string"}}},
        timeout_seconds=7,
        cost_per_use="0.5",
        endpoint="https://internal.example",
        tags=["internal"],
    ).model_schema()
    assert shown == {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    }
