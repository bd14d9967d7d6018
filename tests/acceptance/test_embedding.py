"""An engine embedded in a Python program, with the program's own tools."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
from pydantic import Field

from fumehood import (
    Config,
    Engine,
    InvalidDefinition,
    ToolError,
    tool,
)
from support.answers import code_of, error_of, sandbox_of

pytestmark = pytest.mark.anyio


@tool(sandboxed=False, cost_per_use="0.01", read_only=True)
async def find_city(name: str, limit: Annotated[int, Field(ge=1, le=5)] = 1) -> dict:
    """Find a city.

    Args:
        name: The city's name.
        limit: How many at most.
    """
    if name != "Paris":
        raise ToolError("CITY_NOT_FOUND", f"No city is called {name}.")
    return {"city": name, "limit": limit}


@tool(dangerous=True, sandboxed=False, cost_per_use="0.01")
async def send_invoice(customer: str, amount: Annotated[Decimal, Field(gt=0)]) -> dict:
    """Send an invoice."""
    raise AssertionError("a dangerous tool ran without a human's yes")


@pytest.mark.row("T7", "R4", "E3", "P1")
async def test_embedded_engine_runs_own_function_and_built_in_tools(home: Path) -> None:
    async with Engine(tools=[find_city], config=Config(home=home)) as engine:
        names = [definition.name for definition in engine.tools()]
        assert set(names) >= {"calculator", "find_city", "run_python", "run_restricted_python"}
        assert names == sorted(names)
        envelope = await engine.call("find_city", {"name": "Paris", "limit": "9"})
        assert envelope.data == {"city": "Paris", "limit": 5}
        assert len(envelope.metadata.warnings) == 2
        assert envelope.metadata.usage.cost == "0.010000"
        assert sandbox_of(envelope).placement == "host"
        assert (await engine.call("calculator", {"expression": "1 + 1"})).data["value"] == 2


@pytest.mark.row("A1", "P12")
async def test_dangerous_tool_without_approver_is_refused_and_dry_run_explains_it(
    home: Path,
) -> None:
    async with Engine(tools=[send_invoice], config=Config(home=home)) as engine:
        arguments = {"customer": "Ada", "amount": 12.5}
        refused = await engine.call("send_invoice", arguments)
        assert (code_of(refused), error_of(refused).human_review) == (
            "REQUIRES_HUMAN_APPROVAL",
            True,
        )
        assert refused.metadata.usage.cost == "0.000000"
        plan = (await engine.call("send_invoice", arguments, dry_run=True)).data
        assert plan["would_run"] is False
        assert plan["refused_with"] == "REQUIRES_HUMAN_APPROVAL"
        assert plan["approval"] == {"required": True, "approvers": [], "quorum": 1}


@pytest.mark.row("E2")
async def test_custom_token_counter_is_used_for_usage(home: Path) -> None:
    class Words:
        estimated = False

        def count(self, characters: str, kind: object) -> int:
            return len(characters.split())

    async with Engine(config=Config(home=home), token_counter=Words()) as engine:
        usage = (await engine.call("calculator", {"expression": "1 + 1"})).metadata.usage
        assert usage.estimated is False
        assert usage.input_tokens == 3


EXPRESSION_TOOL = {
    "name": "open_calculator",
    "description": "An expression tool whose schema bounds nothing.",
    "executor": "expression",
    "parameters": {
        "properties": {"expression": {"type": "string"}},
        "additionalProperties": True,
    },
}


@pytest.mark.row("S2")
async def test_oversized_guest_request_is_refused_and_guest_survives(home: Path) -> None:
    async with Engine(tools=[EXPRESSION_TOOL], config=Config(home=home)) as engine:
        guest = engine.walls["interpreter"]["guest_pid"]
        envelope = await engine.call("open_calculator", {"expression": "1" + " " * 2_000_000})
        assert code_of(envelope) == "REQUEST_TOO_LARGE"
        assert (await engine.call("open_calculator", {"expression": "1 + 1"})).success
        assert engine.walls["interpreter"]["guest_pid"] == guest


@pytest.mark.row("S2")
async def test_arguments_cannot_override_guest_protocol_keys(home: Path) -> None:
    async with Engine(tools=[EXPRESSION_TOOL], config=Config(home=home)) as engine:
        for smuggled in (
            {"program": "probe", "probe": "files"},
            {"output_bytes": 1},
            {"arguments": {}},
        ):
            envelope = await engine.call("open_calculator", {"expression": "2 + 2", **smuggled})
            assert envelope.data == {"value": 4, "text": "4"}


@tool(sandboxed=False, timeout_seconds=0.05)
async def stubborn() -> str:
    """Swallow the cancellation and return."""
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class():
        return "done after all"


@pytest.mark.row("P8")
async def test_function_that_swallows_cancellation_is_reported_as_timeout(home: Path) -> None:
    async with Engine(tools=[stubborn], config=Config(home=home)) as engine:
        envelope = await engine.call("stubborn")
        assert code_of(envelope) == "TIMEOUT"


OWN_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"message": "\ud800"}, "OWN_CODE"),
    ({"message": "m" * 10_000_000}, "OWN_CODE"),
    ({"message": "m", "details": {"a": object()}}, "EXECUTION_ERROR"),
    ({"message": "m", "details": {"a": "x" * 200_000}}, "OUTPUT_LIMIT_EXCEEDED"),
    ({"message": "m", "details": {"a": 1}}, "OWN_CODE"),
]


@tool(sandboxed=False)
async def fails(number: int) -> None:
    """Fail with an error of its own."""
    raise ToolError("OWN_CODE", **OWN_ERRORS[number][0])


@pytest.mark.row("E1")
async def test_tool_error_is_bounded_in_size_like_a_result(home: Path) -> None:
    async with Engine(tools=[fails], config=Config(home=home)) as engine:
        for number, (_, code) in enumerate(OWN_ERRORS):
            envelope = await engine.call("fails", {"number": number})
            assert code_of(envelope) == code
            assert len(envelope.model_dump_json()) < 5000


@pytest.mark.row("P11", "S1")
@pytest.mark.parametrize("option", [{"isolation": "call"}, {"memory_limit_mb": 64}])
async def test_isolation_and_memory_options_are_refused_for_host_functions(
    home: Path, option: dict
) -> None:
    async with Engine(tools=[find_city], config=Config(home=home)) as engine:
        envelope = await engine.call("find_city", {"name": "Paris"}, **option)
        assert error_of(envelope).fields == tuple(f"options.{name}" for name in option)


@pytest.mark.row("T2")
async def test_memory_limit_below_minimum_is_refused_at_registration(home: Path) -> None:
    with pytest.raises(InvalidDefinition, match="at least 16"):
        Engine(tools=[{**EXPRESSION_TOOL, "memory_limit_mb": 8}], config=Config(home=home))


@pytest.mark.row("E1")
async def test_invalid_tool_name_is_answered_with_an_error_envelope(home: Path) -> None:
    names: list[Any] = [None, 5, "\ud800", "", "a/b", "x" * 5000]
    async with Engine(config=Config(home=home)) as engine:
        for name in names:
            envelope = await engine.call(name, {})
            assert code_of(envelope) in ("TOOL_NOT_FOUND", "INVALID_PARAMS")
            assert envelope.model_dump_json()


@pytest.mark.row("P2")
async def test_thousands_of_unknown_arguments_are_refused_with_a_bounded_error(home: Path) -> None:
    many = {f"k{number}": 1 for number in range(5000)}
    async with Engine(config=Config(home=home)) as engine:
        envelope = await engine.call("calculator", many)
        assert code_of(envelope) == "INVALID_PARAMS"
        assert len(envelope.model_dump_json()) < 3000
        with pytest.raises(TypeError, match="no keyword argument 'k0'"):
            await engine.call("calculator", {"expression": "1"}, **many)
