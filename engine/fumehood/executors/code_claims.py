"""What a program in a container says of itself, believed only in the agreed form.

Host side. The program can write what it likes where its result is expected. Invariant: a
claim is a value of a model here, whole, or it is nothing; nothing in it decides whether the
run succeeded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

MAX_VALUE_DEPTH = 50
"""A little under what an envelope can carry: the value stands inside its data."""

MAX_EXACT_INTEGER = 2**53 - 1
"""Beyond it readers of JSON disagree about a number, so the value is not given at all."""


class _Claim(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ValueClaim(_Claim):
    """The value of the last expression. `has_value` is false where there was none."""

    value: Any
    has_value: bool
    value_repr: str | None
    notes: list[Annotated[str, Field(max_length=200)]] = Field(default=[], max_length=5)
    """What became of figures that are not in the answer."""


class ExceptionClaim(_Claim):
    """The exception that ended the program. The traceback shows its own lines."""

    type: str = Field(min_length=1, max_length=500)
    message: str
    line: int | None = Field(ge=0, le=2**31)
    traceback: str


class FailureClaim(_Claim):
    """What the program says of its failure; `errno` is an `OSError`'s, for the supervisor."""

    kind: Literal["exception", "memory", "policy", "invalid"]
    message: str
    errno: int | None = None
    exception: ExceptionClaim | None = None


NO_VALUE = ValueClaim(value=None, has_value=False, value_repr=None)


def read_value(result: JsonObject | None) -> ValueClaim:
    """The claimed value; nothing where the claim is in another form."""
    try:
        claim = ValueClaim.model_validate(result)
    except ValidationError:
        return NO_VALUE
    if not claim.has_value:
        return NO_VALUE.model_copy(update={"notes": claim.notes})
    return claim if _is_fit(claim.value) else claim.model_copy(update={"value": None})


def read_failure(claimed: JsonObject | None) -> FailureClaim | None:
    """The claimed failure; None where the claim is in another form."""
    try:
        return FailureClaim.model_validate(claimed)
    except ValidationError:
        return None


def _is_fit(value: Any) -> bool:
    """Whether an envelope can carry it, and every reader reads the same."""
    level = [value]
    for _ in range(MAX_VALUE_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, int) and abs(item) > MAX_EXACT_INTEGER:
                return False
            if isinstance(item, dict):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return _is_json(value)
        level = deeper
    return False


def _is_json(value: Any) -> bool:
    try:
        strict_json.loads(strict_json.dumps(value))
    except (TypeError, ValueError):
        return False
    return True
