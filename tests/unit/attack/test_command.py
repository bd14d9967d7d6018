"""`fumehood doctor --attack`: its options, its exit status, and what is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from typer import Exit
from typer.testing import CliRunner

from fumehood.attack import command
from fumehood.attack.attack import Topic
from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard
from fumehood.attack.targets import WALLS
from fumehood.cli.main import app

ENDS = {"jail": Verdict.FAILED, "container": Verdict.UNTRIED}
"""Wall → how the attack on it ends, if it is not held."""


def card(wall: str) -> WallCard:
    verdict = ENDS.get(wall, Verdict.HELD)
    line = Line(
        "fork", Topic.FLOOD, "self_dos", "start many", verdict, ("ok",), "ok", "ok", (), "It ran.",
        "Stop it.", "", 1,
    )  # fmt: skip
    return WallCard(wall, None, verdict, "", "", 1.0, (line,))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The walls and the runtime that are attacked, of each run."""
    seen: list[Any] = []

    async def targets_of(
        walls: Sequence[str], runtime: str | None, environment: Mapping[str, str]
    ) -> list[str]:
        seen.append((tuple(walls), runtime))
        return list(walls)

    async def run_attacks(
        targets: Sequence[str], *, engine_version: str, quick: bool, on_line: Any
    ) -> Scorecard:
        return Scorecard(engine_version, quick, 1.0, tuple(map(card, targets)))

    monkeypatch.setattr(command, "targets_of", targets_of)
    monkeypatch.setattr(command, "run_attacks", run_attacks)
    return seen


@pytest.mark.parametrize(
    ("options", "chosen", "status"),
    [
        (["--wall", "interpreter"], (("interpreter",), None), 0),
        (["--wall", "interpreter", "--wall", "jail"], (("interpreter", "jail"), None), 1),
        (["--wall", "interpreter", "--wall", "container"], (("interpreter", "container"), None), 4),
        (["--runtime", "runsc", "--quick"], (("container", "gateway"), "runsc"), 4),
        ([], (WALLS, None), 1),
    ],
)
def test_exit_status_is_that_of_the_worst_wall(
    asked: list[Any], options: list[str], chosen: Any, status: int
) -> None:
    done = CliRunner().invoke(app, ["doctor", "--attack", "--json", *options])
    assert done.exit_code == status
    assert asked == [chosen]
    document = json.loads(done.stdout)
    assert [one["wall"] for one in document["walls"]] == list(chosen[0])
    assert document["quick"] is ("--quick" in options)


def test_table_names_the_attack_that_did_not_fail(
    asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "wants_json", lambda _: False)
    with pytest.raises(Exit):
        command.instead(True, ["interpreter", "jail"], show_parts=False, as_json=False)
    out = capsys.readouterr().out
    head, _, row = [line.split() for line in out.splitlines() if line.strip()][:3]
    assert head == ["topic", "attack", "interpreter", "jail"]
    assert row == ["floods", "fork", "held", "FAILED"]
    assert "jail, fork: FAILED: it tried to start many. It ran. Stop it.\n" in out
    assert "interpreter, fork" not in out
    assert out.endswith("interpreter: 1 held, in 1.0 s\njail: 1 FAILED, in 1.0 s\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--quick"], "--wall, --runtime and --quick need --attack."),
        (["--wall", "jail"], "--wall, --runtime and --quick need --attack."),
        (["--runtime", ""], "--wall, --runtime and --quick need --attack."),
        (["--attack", "--wall", "x"], "'x' is not a wall: interpreter, jail, container, gateway."),
        (
            ["--attack", "--wall", "jail", "--runtime", "runc"],
            "--runtime needs the container wall, or the gateway.",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    asked: list[Any], options: list[str], words: str
) -> None:
    done = CliRunner().invoke(app, ["doctor", *options])
    assert (done.exit_code, done.stderr, asked) == (2, f"{words}\n", [])


def test_list_of_parts_is_shown_instead_of_attacks(asked: list[Any]) -> None:
    done = CliRunner().invoke(app, ["doctor", "--attack", "--parts", "--json"])
    assert done.exit_code == 0
    shown = {one["name"]: one["adds"] for one in json.loads(done.stdout)["parts"]}
    assert shown["attack"] == {
        "options": ["doctor --attack", "doctor --wall", "doctor --runtime", "doctor --quick"]
    }
    assert asked == []
