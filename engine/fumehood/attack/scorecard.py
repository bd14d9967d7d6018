"""The scorecard of the attacks, with a verdict for each attack and each wall. Values only.

`as_document` returns the machine-readable form. The form is stable: keys may be added, and if a key
is renamed or removed, the number in `format` changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade

FORMAT = 1


class Verdict(StrEnum):
    """The verdict on one attack, one wall, or all walls."""

    HELD = "held"
    FAILED = "failed"
    UNTRIED = "untried"
    ABSENT = "absent"
    """The host lacks this optional wall or runtime, which is not a failure. Only walls have this
    verdict."""


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one attack on one wall."""

    id: str
    topic: str
    harm: str
    tries: str
    verdict: Verdict
    expected: tuple[str, ...]
    ended: str | None
    """How the attack ended; null if the attack was not tried."""
    twin: str | None
    """How the attack's harmless twin ended; null if the twin was not tried."""
    seen: tuple[str, ...]
    """The checks from outside that passed, as text."""
    why: str
    """Why the wall failed against the attack, or why the attack was not tried; otherwise empty."""
    cure: str
    differs: str
    """What differs under this runtime, and why the difference is not a weakness; empty if nothing
    differs."""
    ms: int


@dataclass(frozen=True, slots=True)
class WallCard:
    """The results of the attacks on one wall. `why` and `cure` are set if the whole wall could not
    be tried.
    """

    wall: str
    runtime: str | None
    verdict: Verdict
    why: str
    cure: str
    seconds: float
    attacks: tuple[Line, ...]
    grade: Grade | None = None
    """How strongly the wall's containers hold programs, if it has containers."""

    @property
    def name(self) -> str:
        """The wall's name, followed by its runtime if it has one, for example `container/runc`."""
        return self.wall if self.runtime is None else f"{self.wall}/{self.runtime}"

    def count(self, verdict: Verdict) -> int:
        """Return the number of attacks with this verdict."""
        return sum(line.verdict is verdict for line in self.attacks)

    def as_document(self) -> JsonObject:
        """Return this wall's part of the machine-readable scorecard."""
        counted = (Verdict.HELD, Verdict.FAILED, Verdict.UNTRIED)
        return {**asdict(self), "counts": {one.value: self.count(one) for one in counted}}


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The results of the attacks on all walls."""

    engine_version: str
    is_quick: bool
    seconds: float
    walls: tuple[WallCard, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on all walls together. `FAILED`: a wall failed. `HELD`: every wall held,
        apart from absent walls. `UNTRIED`: any other case.
        """
        verdicts = {card.verdict for card in self.walls}
        if Verdict.FAILED in verdicts:
            return Verdict.FAILED
        return Verdict.HELD if verdicts - {Verdict.ABSENT} == {Verdict.HELD} else Verdict.UNTRIED

    def as_document(self) -> JsonObject:
        return {
            "format": FORMAT,
            "engine_version": self.engine_version,
            "verdict": self.verdict.value,
            "quick": self.is_quick,
            "seconds": self.seconds,
            "walls": [card.as_document() for card in self.walls],
        }


def verdict_of(lines: Iterable[Line]) -> Verdict:
    """Return the worst verdict among the attacks on one wall, or `UNTRIED` if there are no
    attacks.
    """
    verdicts = {line.verdict for line in lines}
    for verdict in (Verdict.FAILED, Verdict.UNTRIED):
        if verdict in verdicts:
            return verdict
    return Verdict.HELD if verdicts else Verdict.UNTRIED
