"""The console beside a daemon: how it is started again."""

from __future__ import annotations

import pytest

from fumehood.cli.serve import STEADY_S, keep_running

pytestmark = pytest.mark.row("A6")


def pauses_of(lives_s: list[float]) -> list[float]:
    """The pauses after consoles that lived for so long."""
    clock, pauses = 0.0, list[float]()
    lives = iter(lives_s)

    def run() -> int:
        nonlocal clock
        clock += next(lives)
        return -9

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == len(lives_s)

    keep_running(run, pause, lambda: clock)
    return pauses


def test_console_that_dies_at_once_is_tried_less_and_less_and_told_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pauses_of([0.1] * 9) == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    told = capsys.readouterr().err
    assert told.count("The console ended (-9); it is started again") == 1


def test_console_that_ran_for_a_while_is_started_again_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pauses_of([0.1, 0.1, STEADY_S, 0.1]) == [1, 2, 1, 2]
    assert capsys.readouterr().err.count("The console ended") == 2
