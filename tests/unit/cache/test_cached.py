"""Calls of cacheable tools: cache keys, isolation between callers, and what is never cached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fumehood import Envelope, ToolError, ToolResult, tool
from fumehood.budgets.in_engine import Spending
from fumehood.cache.in_engine import Cache
from fumehood.call_options import CallBody
from fumehood.core.identity import Principal
from fumehood.pipeline import conclude
from fumehood.registry.declare import FunctionTool
from support.answers import code_of, error_of
from support.definitions import expression_document
from support.identities import ADMIN, bind, make_agent
from support.recording import Bench, bench

pytestmark = [pytest.mark.anyio, pytest.mark.row("P4")]

SUM = {"expression": "1"}
REFUSED = ToolError("CITY_NOT_FOUND", "There is no such city.")


@dataclass
class Counted:
    """A cacheable host function that counts its runs; each one waits for `may_end`."""

    result: Callable[[int], Any] = lambda run: {"run": run}
    runs: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_end.set()

    def as_tool(self, **fields: Any) -> FunctionTool:
        async def look(city: Any = None, unit: Any = None) -> Any:
            self.runs += 1
            run = self.runs
            self.begun.set()
            await self.may_end.wait()
            result = self.result(run)
            if isinstance(result, Exception):
                raise result
            return result

        given = {"sandboxed": False, "read_only": True, "cacheable": True, "description": "Look."}
        return tool(**{**given, **fields})(look)


@dataclass
class Case:
    """An engine with the tool `look`."""

    bench: Bench
    counted: Counted

    async def look(
        self, arguments: Any = None, by: Principal | None = None, **options: Any
    ) -> Envelope:
        body = CallBody.model_validate({"arguments": arguments or {}, "options": options})
        engine = self.bench.engine
        return await engine.run("look", body, by or engine.owner)

    @property
    def runs(self) -> int:
        return self.counted.runs


@asynccontextmanager
async def case(home: Path, counted: Counted | None = None, **fields: Any) -> AsyncIterator[Case]:
    config = fields.pop("config", {})
    counted = counted or Counted()
    async with bench(home, [counted.as_tool(**fields)], **config) as made:
        yield Case(made, counted)


def hit(envelope: Envelope) -> bool | None:
    """Whether the answer was a cache hit, or None if the cache was not involved."""
    cache = envelope.metadata.cache
    return None if cache is None else cache.hit


async def test_second_equal_call_gets_cached_result_at_no_cost(home: Path) -> None:
    counted = Counted(lambda run: ToolResult({"run": run}, tokens_used=5))
    config = {"budgets": [{"name": "b", "calls": 1}]}
    async with case(home, counted, cost_per_use="0.25", cache_ttl=100, config=config) as c:
        first = await c.look({"city": "Rome"})
        c.bench.clock.advance(1.5)
        second = await c.look({"city": "Rome"})
        third = await c.look({"city": "Oslo"})
        standing = c.bench.engine.part(Spending).budgets.standings()[0]
    assert first.metadata.model_dump()["cache"] == {"hit": False}
    assert second.metadata.model_dump()["cache"] == {
        "hit": True, "cached_at": first.metadata.timestamp, "ttl_remaining": 98.5,
    }  # fmt: skip
    assert second.success
    assert second.data == first.data == {"run": 1}
    assert first.metadata.usage.cost == "0.250000"
    assert second.metadata.usage.model_dump() == {
        "input_tokens": 0, "output_tokens": 0, "estimated": True, "tokens_used": 0,
        "cost": "0.000000", "currency": "USD",
    }  # fmt: skip
    assert second.metadata.sandbox is None
    assert second.metadata.resources.output_bytes is None
    assert second.metadata.timestamp == "2026-01-01T00:00:01.500Z"
    assert (c.runs, standing.left) == (1, 0)  # the budget is used up, and a hit needs none
    assert code_of(third) == "QUOTA_EXCEEDED"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"cacheable": False}, {}),
        ({}, {"enable_cache": False}),
        ({}, {"debug": True}),
        ({}, {"idempotency_key": "auto"}),
    ],
)
@pytest.mark.row("P11")
async def test_cache_is_bypassed_by_uncacheable_tool_debug_or_idempotency_key(
    home: Path, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    async with case(home, **fields) as c:
        other = await c.look(**options)
        plain = await c.look()  # control: nothing was written
        again = await c.look(**options)
        assert c.bench.engine.part(Cache).answers.status().entries == (0 if fields else 1)
    assert (hit(other), hit(again)) == (None, None)
    assert hit(plain) is (None if fields else False)
    assert "cache" not in other.metadata.model_dump()
    assert c.runs == (2 if "idempotency_key" in options else 3)


@pytest.mark.parametrize(
    ("decision", "code"), [("ask", "REQUIRES_HUMAN_APPROVAL"), ("deny", "PERMISSION_DENIED")]
)
@pytest.mark.row("A1")
async def test_new_policy_rule_applies_before_cached_answers(
    home: Path, decision: str, code: str
) -> None:
    rule = '[[rules]]\nid = "r"\ndecision = "{}"\ntools = ["{}"]\nreason = "So."\n'
    file = home / "policy.toml"
    file.write_text(rule.format(decision, "calculator"))
    file.chmod(0o600)
    async with case(home, config={"policy_file": file}) as c:
        assert [hit(await c.look()) for _ in range(2)] == [False, True]
        file.write_text(rule.format(decision, "look"))
        await c.bench.engine.policy.reload(ADMIN)
        refused = await c.look()
    assert code_of(refused) == code
    assert hit(refused) is None
    assert c.runs == 1


# Whose answer it is


async def test_fixed_arguments_are_always_part_of_the_cache_key(
    home: Path,
) -> None:
    async with case(home, cache_key_params=["unit"]) as c:
        engine = c.bench.engine
        await make_agent(engine.agents, "a", engine.owner.id)
        for city in ("Rome", "Oslo"):
            await bind(engine.agents, "a", ["look"], fixed={"city": city})
            answer = await c.look({"unit": "C"}, agent_id="a")
            assert hit(answer) is False
        assert hit(await c.look({"unit": "C"}, agent_id="a")) is True


async def test_cached_answer_has_the_argument_warnings_of_its_own_call(home: Path) -> None:
    document = expression_document(read_only=True, cacheable=True)
    async with bench(home, [document]) as b:
        call = b.engine.call
        odd = await call("sums", {**SUM, "colour": "red"}, timeout_seconds=900)
        plain = await call("sums", SUM)
        other = await call("sums", {**SUM, "size": 1})
    assert len(odd.metadata.warnings) == 2
    assert (hit(plain), plain.metadata.warnings) == (True, ())
    assert hit(other) is True
    assert len(other.metadata.warnings) == 1
    assert "size" in other.metadata.warnings[0]
    # As a program may store it.
    stored = other.model_dump(exclude_unset=True)["metadata"]
    assert stored["warnings"] == other.metadata.warnings


async def test_modifying_a_cached_answer_does_not_affect_later_ones(home: Path) -> None:
    async with case(home, Counted(lambda run: {"list": [run]})) as c:
        for _ in range(3):
            answer = await c.look()
            assert answer.data == {"list": [1]}
            answer.data["list"].append("poison")
            answer.data["more"] = 1


# What is never kept


@pytest.mark.parametrize(
    "data",
    [
        {"limits_hit": ["pids"]},
        {"url": "/v1/blobs/blob_0?expires=1&signature=0"},
        {"text": "see /v1/blobs/blob_0"},
        {"text": "x" * 20_000},  # which is shortened, and its whole is a blob
    ],
)
async def test_limited_result_or_result_with_blob_link_is_not_cached(
    home: Path, data: dict[str, Any]
) -> None:
    async with case(home, Counted(lambda run: data)) as c:
        first = await c.look()
        assert first.success
        assert hit(await c.look()) is False
        assert c.bench.engine.part(Cache).answers.status().entries == 0


# Equal calls at once


async def test_call_waiting_for_equal_call_keeps_its_own_timeout(home: Path) -> None:
    counted = Counted()
    counted.may_end.clear()
    async with case(home, counted) as c:
        first = asyncio.create_task(c.look())
        await counted.begun.wait()
        hasty = await c.look(timeout_seconds=0.01)
        assert (code_of(hasty), error_of(hasty).retryable) == ("TIMEOUT", True)
        assert hasty.metadata.sandbox is None
        counted.may_end.set()
        assert (await first).success
    assert c.runs == 1


async def test_internal_error_releases_the_cache_claim(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*given: Any) -> Any:
        raise RuntimeError("a bug")

    async with case(home) as c:
        with monkeypatch.context() as patch:
            patch.setattr(conclude, "build_envelope", broken)
            with pytest.raises(RuntimeError):
                await c.look()
        assert c.bench.engine.part(Cache).answers.status().running == 0
        assert (await c.look()).success
