"""`fumehood` without arguments: what it says of an engine, and of what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fumehood.cli import overview as command
from fumehood.cli.main import app

BUDGET = {
    "budget": "daily", "subject": {"agent": "clerk\x1b[2J"}, "period": "day", "unit": "calls",
    "limit": 10, "spent": 7, "held": 1, "left": 2, "resets_at": None,
}  # fmt: skip


def answers(
    *, containers: bool = True, waiting: int = 0, calls: int = 0, missing: tuple[str, ...] = (), status: str = "ready",
    budgets: tuple[dict[str, Any], ...] = (), error: Any = None,
) -> dict[str, Any]:  # fmt: skip
    container = {"ready": containers and not missing, "enforced": [], "missing": list(missing)}
    page = {"has_more": False, "next_cursor": None, "total_count": waiting}
    return {
        "ready": {"status": status, "walls": {"container": container}},
        "approvals": {"error": error, "data": {"items": [{}] * waiting, "pagination": page}},
        "usage": {
            "error": error,
            "data": {"total": {"calls": calls, "errors": 1}, "budgets": list(budgets),
                     "currency": "CHF"},
        },
    }  # fmt: skip


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The overview for these answers of an engine, as people read it."""
    import socket

    path = tmp_path / "engine.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    monkeypatch.setenv("FUMEHOOD_SOCKET", str(path))
    monkeypatch.setattr(command, "wants_json", lambda asked: asked)

    def asked(given: Any) -> str:
        name = lambda target: target.partition("?")[0].rpartition("/")[2]  # noqa: E731
        monkeypatch.setattr(
            command, "send_once", lambda path, request, token: given[name(request.path)]
        )
        done = CliRunner().invoke(app, [])
        assert done.exit_code == 0, done.output
        return done.output

    yield asked
    listener.close()


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({}, "fumehood call calculator"),
        ({"calls": 3}, "fumehood calls tail"),
        ({"calls": 3, "budgets": (BUDGET,)}, "fumehood usage"),
        ({"calls": 3, "budgets": ({**BUDGET, "spent": 6},)}, "fumehood calls tail"),
        ({"missing": ("No image python.",), "budgets": (BUDGET,)}, "fumehood images build"),
        ({"waiting": 2, "missing": ("No image python.",)}, "fumehood approvals watch"),
        ({"waiting": 2, "status": "not_ready"}, "fumehood doctor"),
        ({"error": {"code": "UNAUTHORIZED"}}, "fumehood doctor"),
    ],
    ids=str,
)
def test_next_step_follows_from_the_state(ask: Any, state: dict[str, Any], step: str) -> None:
    lines = dict(line.split(maxsplit=1) for line in ask(answers(**state)).splitlines())
    assert lines["next"].startswith(step)


def test_figures_are_shown_and_names_cannot_write_to_the_terminal(ask: Any) -> None:
    shown = ask(answers(waiting=2, calls=17, budgets=(BUDGET,), missing=("No image python.",)))
    for said in (
        "calls of yours that wait: 2", "calls of yours: 17; with an error: 1",
        "daily of clerk\\u{001b}[2J: 80% of 10 calls", "No image python.", "--help",
    ):  # fmt: skip
        assert said in shown
    assert "\x1b" not in shown


def test_overview_says_if_containers_are_unavailable(ask: Any) -> None:
    words = "containers unavailable; for the reason: fumehood doctor"
    assert words in ask(answers(containers=False))
    assert words not in ask(answers())


def test_overview_of_a_money_budget_names_the_currency(ask: Any) -> None:
    money = {**BUDGET, "unit": "money", "limit": "5.000000", "spent": "4", "held": "0"}
    assert "80% of 5.000000 CHF" in ask(answers(budgets=(money,)))


@pytest.mark.parametrize("odd", [[], None, {}, {"status": "ready", "walls": []}, "x"], ids=str)
def test_overview_says_if_the_server_is_not_an_engine(ask: Any, odd: Any) -> None:
    assert "not of this version" in ask(dict.fromkeys(("ready", "approvals"), odd))


def test_overview_without_an_engine_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_SOCKET", str(tmp_path / "none.sock"))
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["engine"], found["next"]) == ("not running", "fumehood serve")
