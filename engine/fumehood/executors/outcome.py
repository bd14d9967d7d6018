"""What became of one run: the value between `execute` and `shape`."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fumehood.model.errors import EndedBy, EngineError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and what it used. Figures that were not measured are None."""

    ended_by: EndedBy
    isolation: str
    data: Any = None
    error: EngineError | None = None
    cpu_ms: float | None = None
    peak_memory_bytes: int | None = None
    output_bytes: int | None = None
    tokens_used: int = 0
    cost: Decimal = field(default_factory=Decimal)
    is_rehearsal: bool = False
    warnings: tuple[str, ...] = ()
    """What the caller should know of a run that went on."""
    max_data_bytes: int | None = None
    """How large `data` may be, where its parts are bounded by themselves; else the wall's
    output limit."""

    whole_fields: frozenset[str] = frozenset()
    """Fields of `data` that hold a file's content: they are never shortened."""

    @classmethod
    def rehearsed(cls, data: Any) -> Outcome:
        """The outcome of a dry run: nothing ran."""
        return cls(EndedBy.OK, "none", data=data, is_rehearsal=True)
