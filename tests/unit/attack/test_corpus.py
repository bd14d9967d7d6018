"""The corpus of attacks and the scorecard."""

from __future__ import annotations

import ast

import pytest

from fumehood.attack.attack import Harm, Language, Look, Topic
from fumehood.attack.corpus import attacks_on
from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard, verdict_of
from fumehood.attack.targets import WALLS

ROWS = [(wall, attack) for wall in WALLS for attack in attacks_on(wall)]
OF_PROGRAMS = [attack for _, attack in ROWS if attack.language is not Language.CALCULATOR]
CONTAINER_TOPICS = {
    Topic.FLOOD, Topic.NETWORK, Topic.HOST, Topic.KERNEL, Topic.RIGHTS, Topic.GUEST, Topic.RESET,
}  # fmt: skip


def parsed(code: str) -> ast.Module:
    """A program with something in the place of each bait."""
    for name, filled in (("@PORT@", "1"), ("@PID@", "1"), ("@ADDRESSES@", "[]")):
        code = code.replace(name, filled)
    return ast.parse(code)


def test_corpus_covers_its_documented_topics() -> None:
    for wall in WALLS:
        names = [attack.id for attack in attacks_on(wall)]
        assert len(set(names)) == len(names) >= (14 if wall == "gateway" else 20)
    assert {attack.topic for attack in attacks_on("container")} == CONTAINER_TOPICS
    assert {attack.harm for _, attack in ROWS} == set(Harm)
    assert {look for _, attack in ROWS for look in attack.looks} == set(Look)


@pytest.mark.parametrize("wall", WALLS)
def test_quick_attacks_cover_every_topic_of_their_wall(wall: str) -> None:
    every = {attack.topic for attack in attacks_on(wall)}
    quick = {attack.topic for attack in attacks_on(wall) if attack.is_quick}
    assert quick >= every - ({Topic.HOST, Topic.NETWORK} if wall == "interpreter" else set())


def test_attack_programs_end_without_a_wall() -> None:
    for attack in OF_PROGRAMS:
        for node in ast.walk(parsed(attack.code)):
            endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant)
            assert not endless, attack.id


def test_attack_programs_use_only_loopback_or_unassigned_addresses() -> None:
    for attack in OF_PROGRAMS:
        for literal in ast.walk(parsed(attack.code)):
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                parts = literal.value.split(".")
                if len(parts) == 4 and all(part.isdecimal() for part in parts):
                    assert literal.value in ("127.0.0.1", "192.0.2.1")  # RFC 5737


# -- The scorecard's verdict and its form for machines -------------------------------------

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
def test_overall_verdict_is_that_of_the_worst_wall(
    verdicts: tuple[Verdict, ...], whole: Verdict
) -> None:
    assert card(*verdicts).verdict is whole


def test_wall_verdict_is_that_of_its_worst_attack() -> None:
    assert verdict_of([line(HELD), line(HELD)]) is HELD
    assert verdict_of([line(HELD), line(UNTRIED)]) is UNTRIED
    assert verdict_of([line(UNTRIED), line(FAILED)]) is FAILED
    assert verdict_of([]) is UNTRIED


def test_scorecard_document_has_the_documented_form() -> None:
    walls = (WallCard("container", "runc", FAILED, "", "", 1.5, (line(HELD), line(FAILED))),)
    document = Scorecard("1.0", True, 2.5, walls).as_document()
    attacks = document["walls"][0].pop("attacks")
    assert document == {
        "format": 1, "engine_version": "1.0", "verdict": "failed", "quick": True, "seconds": 2.5,
        "walls": [{
            "wall": "container", "runtime": "runc", "verdict": "failed", "why": "", "cure": "",
            "seconds": 1.5, "counts": {"held": 1, "failed": 1, "untried": 0},
            "grade": None,
        }],
    }  # fmt: skip
    assert attacks[1] == {
        "id": "open", "topic": "network", "harm": "exfil", "tries": "speak", "verdict": "failed",
        "expected": ("policy",), "ended": "policy", "twin": "ok", "seen": ("nothing",), "why": "",
        "cure": "", "differs": "", "ms": 3,
    }  # fmt: skip
