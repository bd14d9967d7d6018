"""The scorecard: what held, what failed, what could not be tried. Values only.

`as_document` is the form for machines. It is stable: keys are added, never renamed or removed,
and `format` changes where that would not do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from fumehood.core.json_types import JsonObject

FORMAT = 1


class Verdict(StrEnum):
    """Of one attack, one wall, or all of them."""

    HELD = "held"
    FAILED = "failed"
    UNTRIED = "untried"
    ABSENT = "absent"
    """A runtime that this host does not have: shown, and no fault. Of walls only."""


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one attack on one wall."""

    id: str
    topic: str
    harm: str
    tries: str
    verdict: Verdict
    expected: tuple[str, ...]
    ended: str | None
    """How the attack ended; null where it was not tried."""
    twin: str | None
    """How its harmless twin ended; null where that was not tried."""
    seen: tuple[str, ...]
    """What was looked at from outside, in words."""
    why: str
    """Why it failed or was not tried."""
    cure: str
    differs: str
    """What is different under this runtime, and why that is no hole; else empty."""
    ms: int


@dataclass(frozen=True, slots=True)
class WallCard:
    """One wall with its lines. `why` and `cure` where it could not be tried at all."""

    wall: str
    runtime: str | None
    verdict: Verdict
    why: str
    cure: str
    seconds: float
    attacks: tuple[Line, ...]

    @property
    def name(self) -> str:
        """`container/runc`, or the wall's own."""
        return self.wall if self.runtime is None else f"{self.wall}/{self.runtime}"

    def count(self, verdict: Verdict) -> int:
        """How many lines have this verdict."""
        return sum(line.verdict is verdict for line in self.attacks)


@dataclass(frozen=True, slots=True)
class Scorecard:
    """All walls."""

    engine_version: str
    is_quick: bool
    seconds: float
    walls: tuple[WallCard, ...]

    @property
    def verdict(self) -> Verdict:
        """Failed where anything did; untried where anything that should be here was not tried,
        or nothing was.
        """
        verdicts = {card.verdict for card in self.walls}
        if Verdict.FAILED in verdicts:
            return Verdict.FAILED
        return Verdict.HELD if verdicts - {Verdict.ABSENT} == {Verdict.HELD} else Verdict.UNTRIED

    def as_document(self) -> JsonObject:
        """As JSON."""
        return {
            "format": FORMAT,
            "engine_version": self.engine_version,
            "verdict": self.verdict.value,
            "quick": self.is_quick,
            "seconds": self.seconds,
            "walls": [_wall_document(card) for card in self.walls],
        }


def verdict_of(lines: Iterable[Line]) -> Verdict:
    """Of a wall by its lines: the worst; untried where there are none."""
    verdicts = {line.verdict for line in lines}
    for verdict in (Verdict.FAILED, Verdict.UNTRIED):
        if verdict in verdicts:
            return verdict
    return Verdict.HELD if verdicts else Verdict.UNTRIED


def _wall_document(card: WallCard) -> JsonObject:
    counted = (Verdict.HELD, Verdict.FAILED, Verdict.UNTRIED)
    return {
        "wall": card.wall,
        "runtime": card.runtime,
        "verdict": card.verdict.value,
        "why": card.why,
        "cure": card.cure,
        "seconds": card.seconds,
        "counts": {verdict.value: card.count(verdict) for verdict in counted},
        "attacks": [asdict(line) for line in card.attacks],
    }
