"""The outcome of one run: the value between `execute` and `result`."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fumehood.core.errors import Cancelled, EndedBy, EngineError
from fumehood.core.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class CutText:
    """A text that was too long for memory: both ends, and a link to the whole."""

    field: str
    """Its place in `data` or in the error's `details`, which hold an empty text."""
    head: str
    tail: str
    length: int
    """Characters in all."""
    link: JsonObject
    """`resource_url` and `expires_at`, or `not_kept` with the reason."""


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
    is_dry_run: bool = False
    warnings: tuple[str, ...] = ()
    """Warnings for the caller."""
    max_data_bytes: int | None = None
    """How large `data` may be, where its parts are bounded by themselves; else the wall's
    output limit."""
    cuts: tuple[CutText, ...] = ()
    """Texts that are not in `data` or `details` as a whole."""
    whole_fields: frozenset[str] = frozenset()
    """Fields of `data` that hold a file's content: they are never shortened."""
    redacted: int = 0
    """Matches that were replaced in its output already."""
    network_ms: float = 0.0
    """The time of requests to other services."""

    @classmethod
    def cancelled(cls, isolation: str) -> Outcome:
        """The outcome of a run that its caller has ended."""
        return cls(EndedBy.CANCELLED, isolation, error=cancelled())

    @classmethod
    def of_dry_run(cls, data: Any) -> Outcome:
        """The outcome of a dry run: nothing ran."""
        return cls(EndedBy.OK, "none", data=data, is_dry_run=True)


def cancelled() -> Cancelled:
    """The error for a call that its own caller cancelled."""
    return Cancelled(
        "The call was cancelled by its caller.", details={"ended_by": EndedBy.CANCELLED.value}
    )
