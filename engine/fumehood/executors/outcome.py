"""The outcome of one run, which the pipeline's stage `execute` returns and `result` shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fumehood.core.envelope import NetworkReport
from fumehood.core.errors import Cancelled, EndedBy, EngineError
from fumehood.core.json_types import JsonObject
from fumehood.executors.around import HeldBack
from fumehood.executors.effects import Effect
from fumehood.sandbox.session_use import HeldFiles


@dataclass(frozen=True, slots=True)
class CutText:
    """A text that was too long for memory: its first and last part, and a link to all of it."""

    field: str
    """The field of `data` or of the error's `details` to which it belongs. The field holds an empty
    text."""
    head: str
    tail: str
    length: int
    """Length of the whole text in characters."""
    link: JsonObject
    """Either `resource_url` and `expires_at`, or `not_kept` with the reason."""


@dataclass(frozen=True, eq=False, slots=True)
class HeldTrial:
    """A trial that has run, and the effect that it would have on its session and on others."""

    files: HeldFiles
    effect: Effect
    outcome: Outcome
    held_back: tuple[HeldBack, ...] = ()
    """What parts have held back of it."""


MAX_DATA_BYTES = 16 << 20
"""Maximum size as JSON of data whose parts have limits of their own, in bytes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and what it used. Numbers that were not measured are None."""

    ended_by: EndedBy
    isolation: str
    node: str | None = None
    """The machine on which it ran, if the engine has nodes."""
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
    """Size limit of `data` as JSON, in bytes, if its parts have limits of their own. None: the
    call's output limit applies."""
    cuts: tuple[CutText, ...] = ()
    """Texts that `data` or `details` do not contain as a whole."""
    whole_fields: frozenset[str] = frozenset()
    """Fields of `data` that hold a file's content and are never shortened."""
    redacted: int = 0
    """Number of matches that redaction has already replaced in its output."""
    network: NetworkReport | None = None
    """What a program sent through the gateway, if it had network."""
    held: HeldTrial | None = None
    """The effect that a human decides on, of a trial that has run."""
    kept: tuple[object, ...] = ()
    """What parts keep of the run until the call is answered (`CallPart.answered`)."""
    network_ms: float = 0.0
    """Milliseconds spent on requests to other services."""

    @classmethod
    def cancelled(cls, isolation: str) -> Outcome:
        """Return the outcome of a run that its caller cancelled."""
        return cls(EndedBy.CANCELLED, isolation, error=cancelled())


def cancelled() -> Cancelled:
    """Return the error of a call that its own caller cancelled."""
    return Cancelled(
        "The call was cancelled by its caller.", details={"ended_by": EndedBy.CANCELLED.value}
    )
