"""The outcome of one run. The pipeline's stage `execute` returns the outcome, and its stage
`result` shapes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fumehood.core.errors import Cancelled, EndedBy, EngineError
from fumehood.core.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class CutText:
    """A text that was too long for memory: its first and last parts, and a link to all of it."""

    field: str
    """The field of `data` or of the error's `details` to which the text belongs. The field itself
    contains an empty text."""
    head: str
    tail: str
    length: int
    """Length of the whole text in characters."""
    link: JsonObject
    """Either `resource_url` and `expires_at`, or `not_kept` with the reason."""


MAX_DATA_BYTES = 16 << 20
"""Maximum size as JSON, in bytes, of data whose fields have separate limits."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, its result, and the resources that it used. Values that were not measured
    are None.
    """

    ended_by: EndedBy
    isolation: str
    node: str | None = None
    """The name of the node on which the tool ran, if the engine has nodes."""
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
    """Size limit of `data` as JSON, in bytes, if its fields have separate limits. None: the call's
    output limit applies."""
    cuts: tuple[CutText, ...] = ()
    """Texts that were too long to be included in `data` or `details`."""
    whole_fields: frozenset[str] = frozenset()
    """Fields of `data` that hold a file's content and are never shortened."""
    redacted: int = 0
    """Number of matches that redaction has already replaced in the output."""
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer's `SandboxReport` that parts fill in."""
    held: object | None = None
    """The effect of the run, if a part holds it back until a human has decided on it. The part
    knows its type (`CallPart.decide`)."""
    kept: tuple[object, ...] = ()
    """Values that parts keep from the run until the call is answered (`CallPart.answered`)."""
    network_ms: float = 0.0
    """Milliseconds spent on requests to other services."""

    @classmethod
    def cancelled(cls, isolation: str) -> Outcome:
        """Return the outcome of a run that the call's caller cancelled."""
        return cls(EndedBy.CANCELLED, isolation, error=cancelled())


def cancelled() -> Cancelled:
    """Return the error of a call that its caller cancelled."""
    return Cancelled(
        "The call was cancelled by its caller.", details={"ended_by": EndedBy.CANCELLED.value}
    )
