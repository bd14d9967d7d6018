"""The commands, of which only the one that is asked for is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fumehood.cli.main import COMMANDS, app, load_command
from fumehood.cli.plain_values import PlainCommand


@pytest.mark.parametrize("name", COMMANDS)
def test_line_of_help_is_that_of_the_command(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.get_short_help_str(200).rstrip(".") == COMMANDS[name].rstrip(".")


def test_misspelt_command_and_subcommand_are_told_the_near_ones() -> None:
    invoke = CliRunner().invoke
    assert "Did you mean 'call', 'calls'?" in invoke(app, ["calll"]).output
    assert "Did you mean 'show'?" in invoke(app, ["tools", "shw"]).output
    assert "--agent" in invoke(app, ["call", "calculator", "--agnt", "x"]).output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("fumehood ca", ["call", "calls"]),
        ("fumehood tools sh", ["show"]),
        ("fumehood call x --ag", ["--agent"]),
    ],
)
def test_completion_knows_commands_subcommands_and_options(
    shell: str, line: str, completed: list[str]
) -> None:
    asked = {
        "_FUMEHOOD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")),
        "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    done = CliRunner().invoke(app, env=asked, prog_name="fumehood")
    assert done.exit_code == 0
    lines = done.output.split("((")[-1].splitlines()  # zsh has a frame around them
    found = [line.split("\t")[0].split(":")[0].strip('"') for line in lines]
    assert found == completed


VALUES = [
    ["text"], ["text", "--count", "3"], ["text", "--count", "3.0"], ["text", "--count", "x"],
    ["text", "--share", "0.5"], ["text", "--share", "nan"], ["text", "--share", "x"],
    ["text", "--path", "/nowhere"], ["text", "--path", "."], ["text", "--path", ""],
    ["text", "--many", "a", "--many", "b"], ["text", "--few", "3"], ["text", "--few", "9"],
    ["text", "--flag"], [], ["text", "--wrong"],
]  # fmt: skip


@pytest.mark.parametrize("given", VALUES, ids=str)
def test_plain_values_are_what_typer_makes_of_them(given: list[str]) -> None:
    assert _parsed(given, PlainCommand) == _parsed(given, None)


def _parsed(given: list[str], cls: Any) -> tuple[int, str]:
    one = typer.Typer(rich_markup_mode=None, add_completion=False)

    @one.command(cls=cls)
    def show(
        text: str,
        count: int | None = None,
        share: float = 1.0,
        path: Path | None = None,
        many: list[str] | None = typer.Option(None),  # noqa: B008
        few: int = typer.Option(1, min=0, max=5),
        flag: bool = False,
    ) -> None:
        print(repr((text, count, share, path, many, few, flag)))

    done = CliRunner().invoke(one, given)
    return done.exit_code, done.output
