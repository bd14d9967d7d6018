"""How a command ends with a message."""

from __future__ import annotations

import pytest
import typer

from fumehood.cli.exits import ExitCode, fail


def test_words_of_others_in_a_message_cannot_change_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit):
        fail("The index said: \x1b]0;title\x07\x1b[2J\r\u202ebad\nMend that.", ExitCode.UNAVAILABLE)
    assert capsys.readouterr().err == (
        "The index said: \\u{001b}]0;title\\u{0007}\\u{001b}[2J\\u{000d}\\u{202e}bad\nMend that.\n"
    )
