"""The outcome of one run of a tool. The pipeline's stage `execute` returns it, and the stage
`result` converts it to an envelope.
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
    """A text that was too long for memory: its beginning, its end, and a link to the whole text."""

    field: str
    """The field of `data`, or of the error's `details`, that should contain the text. It contains
    an empty text instead."""
    head: str
    tail: str
    length: int
    """Number of characters of the whole text."""
    link: JsonObject
    """Either `resource_url` and `expires_at`, or `not_kept` with the reason why the text was not
    stored."""


MAX_DATA_BYTES = 16 << 20
"""Maximum size of data as JSON, in bytes, if the fields of the data have limits of their own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, its result, and the resources that it used. A value that was not measured is
    None.
    """

    ended_by: EndedBy
    isolation: str
    node: str | None = None
    """The name of the node on which the tool ran. None if the engine has no nodes."""
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
    """Maximum size of `data` as JSON, in bytes, if its fields have limits of their own. If None,
    the call's output limit applies."""
    cuts: tuple[CutText, ...] = ()
    """Texts that were too long for `data` or `details`."""
    whole_fields: frozenset[str] = frozenset()
    """Fields of `data` that contain a file's content, so they are never shortened."""
    redacted: int = 0
    """Number of matches that redaction has already replaced in this outcome."""
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """Fields that parts add to the answer's `SandboxReport`."""
    held: object | None = None
    """The effect of the run, if a part holds it back until a human has decided on it. Only that
    part knows the type of this object (`CallPart.decide`)."""
    kept: tuple[object, ...] = ()
    """Values that parts keep from the run until the call is answered. `CallPart.answered` receives
    them."""
    network_ms: float = 0.0
    """Milliseconds that requests to other services took."""

    @classmethod
    def cancelled(cls, isolation: str) -> Outcome:
        """Return the outcome of a run whose call the caller cancelled."""
        return cls(EndedBy.CANCELLED, isolation, error=cancelled())


def cancelled() -> Cancelled:
    """Return the error for a call that its caller cancelled."""
    return Cancelled(
        "The call was cancelled by its caller.", details={"ended_by": EndedBy.CANCELLED.value}
    )
