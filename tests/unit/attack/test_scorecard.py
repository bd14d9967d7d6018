"""The scorecard's verdict and its form for machines."""

from __future__ import annotations

import pytest

from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard, verdict_of

HELD, FAILED, UNTRIED, ABSENT = Verdict.HELD, Verdict.FAILED, Verdict.UNTRIED, Verdict.ABSENT


def line(verdict: Verdict) -> Line:
    return Line(
        id="open", topic="network", harm="exfil", tries="speak", verdict=verdict,
        expected=("policy",), ended="policy", twin="ok", seen=("nothing",), why="", cure="",
        differs="", ms=3,
    )  # fmt: skip


def card(*verdicts: Verdict) -> Scorecard:
    walls = [WallCard("container", "runc", verdict, "", "", 1.0, ()) for verdict in verdicts]
    return Scorecard("1.0", False, 2.0, tuple(walls))


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ((HELD,), HELD),
        ((HELD, ABSENT), HELD),
        ((HELD, UNTRIED), UNTRIED),
        ((UNTRIED, FAILED, HELD), FAILED),
        ((ABSENT,), UNTRIED),
        ((), UNTRIED),
    ],
)
def test_the_whole_is_as_good_as_its_worst_wall(
    verdicts: tuple[Verdict, ...], whole: Verdict
) -> None:
    assert card(*verdicts).verdict is whole


def test_a_wall_is_as_good_as_its_worst_line_and_without_lines_it_is_untried() -> None:
    assert verdict_of([line(HELD), line(HELD)]) is HELD
    assert verdict_of([line(HELD), line(UNTRIED)]) is UNTRIED
    assert verdict_of([line(UNTRIED), line(FAILED)]) is FAILED
    assert verdict_of([]) is UNTRIED


def test_the_document_has_the_form_that_is_promised() -> None:
    walls = (WallCard("container", "runc", FAILED, "", "", 1.5, (line(HELD), line(FAILED))),)
    document = Scorecard("1.0", True, 2.5, walls).as_document()
    attacks = document["walls"][0].pop("attacks")
    assert document == {
        "format": 1, "engine_version": "1.0", "verdict": "failed", "quick": True, "seconds": 2.5,
        "walls": [{
            "wall": "container", "runtime": "runc", "verdict": "failed", "why": "", "cure": "",
            "seconds": 1.5, "counts": {"held": 1, "failed": 1, "untried": 0},
        }],
    }  # fmt: skip
    assert attacks[1] == {
        "id": "open", "topic": "network", "harm": "exfil", "tries": "speak", "verdict": "failed",
        "expected": ("policy",), "ended": "policy", "twin": "ok", "seen": ("nothing",), "why": "",
        "cure": "", "differs": "", "ms": 3,
    }  # fmt: skip
