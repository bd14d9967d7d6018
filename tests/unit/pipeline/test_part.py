"""Parts that fill in fields of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from fumehood.core.json_types import JsonObject
from fumehood.core.part import PartError
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.context import CallContext
from fumehood.pipeline.part import CallPart, CallParts

pytestmark = pytest.mark.anyio


class Adds(CallPart):
    def __init__(self, value: int | None) -> None:
        self._value = value

    async def answered(
        self, call: CallContext, outcome: Outcome, data: JsonObject
    ) -> Mapping[str, Any]:
        if self._value is None:
            raise OSError("no room")
        return {"field": self._value, f"own_{self._value}": True}


class Trace:
    def __init__(self) -> None:
        self.faults: list[str] = []

    def fault(self, event: str, fault: Exception) -> None:
        self.faults.append(f"{event}: {fault}")


async def test_fault_of_a_part_costs_no_answer_and_the_first_to_fill_in_a_field_wins() -> None:
    trace, unused = Trace(), Any
    call: Any = type("Call", (), {"trace": trace})
    parts = CallParts.of([Adds(None), Adds(1), Adds(2), CallPart()])
    added = await parts.answered(call, unused, {})  # type: ignore[arg-type]
    assert added == {"field": 1, "own_1": True, "own_2": True}
    assert trace.faults == ["part.internal_error: no room"]


class Foreign(CallPart):
    holds_back_with = MappingProxyType({"preview": True})


class Holds(Foreign):
    __module__ = "fumehood.holds"


async def test_only_parts_of_the_product_hold_back_the_effects_of_runs() -> None:
    with pytest.raises(PartError, match="Only the product's own parts"):
        CallParts.of([Foreign()])


async def test_one_part_at_most_holds_back_the_effects_of_runs() -> None:
    held = Holds()
    assert CallParts.of([CallPart(), held]).holding is held
    assert CallParts.of([CallPart()]).holding is None
    with pytest.raises(PartError, match="Holds and Holds both hold back"):
        CallParts.of([held, Holds()])
