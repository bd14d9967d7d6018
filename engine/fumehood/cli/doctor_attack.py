"""`fumehood doctor --attack`: attack this host's own walls, and show the scorecard."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

import anyio
import typer

from fumehood.attack.scorecard import Scorecard, Verdict, WallCard
from fumehood.attack.targets import WALLS, targets_of
from fumehood.cli.exits import ExitCode, fail
from fumehood.core.escaping import printable, visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from fumehood.attack.scorecard import Line

EXITS = {
    Verdict.HELD: ExitCode.SUCCESS,
    Verdict.FAILED: ExitCode.TOOL_FAILED,
    Verdict.UNTRIED: ExitCode.UNAVAILABLE,
}
COLOURS = {
    Verdict.HELD: "green",
    Verdict.FAILED: "bold red",
    Verdict.UNTRIED: "yellow",
    Verdict.ABSENT: "dim",
}
SHOWN = {Verdict.HELD: "held", Verdict.FAILED: "FAILED", Verdict.UNTRIED: "not tried"}


def attack(walls: Sequence[str], runtime: str | None, *, quick: bool, as_json: bool) -> NoReturn:
    """Run the attacks, show the scorecard, and exit with the code of its verdict."""
    unknown = [wall for wall in walls if wall not in WALLS]
    if unknown:
        fail(f"{unknown[0]!r} is not a wall: {', '.join(WALLS)}.", ExitCode.USAGE)
    if runtime is not None and walls and "container" not in walls:
        fail("--runtime needs the container wall.", ExitCode.USAGE)
    chosen = tuple(walls) or (("container",) if runtime is not None else WALLS)
    scorecard = _run(chosen, runtime, quick=quick)
    if as_json:
        from fumehood.cli.show import show_json

        show_json(scorecard.as_document())
    else:
        _show(scorecard)
    raise typer.Exit(EXITS[scorecard.verdict])


def _run(walls: Sequence[str], runtime: str | None, *, quick: bool) -> Scorecard:
    from fumehood.attack.bait import BaitFailed

    try:
        scorecard = anyio.run(_attack_until_told, walls, runtime, quick)
    except BaitFailed as failed:
        fail(f"Nothing was attacked: {failed}.", ExitCode.UNAVAILABLE)
    except OSError as error:
        fail(f"Nothing was attacked: {error.strerror or error}.", ExitCode.UNAVAILABLE)
    if scorecard is None:
        fail("Interrupted. Everything created for the attacks was removed.", ExitCode.UNAVAILABLE)
    return scorecard


async def _attack_until_told(
    walls: Sequence[str], runtime: str | None, quick: bool
) -> Scorecard | None:
    """Return the scorecard, or None if a signal came first. Either way nothing is left behind."""
    from fumehood.attack.run import run_attacks

    scorecard: Scorecard | None = None
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as group:

            async def listen() -> None:
                async for _ in signals:
                    group.cancel_scope.cancel()
                    return

            group.start_soon(listen)
            targets = await targets_of(walls, runtime, os.environ)
            scorecard = await run_attacks(
                targets, engine_version=version("fumehood"), quick=quick, on_line=_told()
            )
            group.cancel_scope.cancel()
    return scorecard


def _told() -> Callable[[str, Line], None]:
    """Show progress on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        return lambda wall, line: None

    def tell(wall: str, line: Line) -> None:
        sys.stderr.write(f"\r\x1b[K{wall}: {line.id}")
        sys.stderr.flush()

    return tell


# -- the table --------------------------------------------------------------------------


def _show(scorecard: Scorecard) -> None:
    from rich.console import Console

    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    console = Console(highlight=False)
    tried = [card for card in scorecard.walls if card.attacks]
    if tried:
        _show_matrix(console, tried)
    _show_faults(console, tried)
    _show_differences(console, tried)
    for card in scorecard.walls:
        console.print(_summary(card))


def _show_matrix(console: Console, cards: Sequence[WallCard]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    by_wall = [{line.id: line for line in card.attacks} for card in cards]
    rows: dict[str, Line] = {}
    for lines in by_wall:
        for name, line in lines.items():
            rows.setdefault(name, line)
    table = Table(
        Column("attack", no_wrap=True),
        *(Column(card.name.replace("/", "\n"), no_wrap=True) for card in cards),
    )
    topic = ""
    for name, first in sorted(rows.items(), key=lambda row: _order(row[1])):
        if first.topic != topic:
            topic = first.topic
            table.add_section()
            table.add_row(Text(topic, style="bold"))
        cells = [_cell(lines.get(name)) for lines in by_wall]
        table.add_row(Text(f"  {name}"), *cells)
    console.print(table)


def _order(line: Line) -> int:
    from fumehood.attack.attack import Topic

    return [topic.value for topic in Topic].index(line.topic)


def _cell(line: Line | None) -> Text:
    from rich.text import Text

    if line is None:
        return Text("·", style="dim")
    mark = "*" if line.differs else ""
    return Text(f"{SHOWN[line.verdict]}{mark}", style=COLOURS[line.verdict])


def _show_faults(console: Console, cards: Sequence[WallCard]) -> None:
    """Show every attack that did not fail, with reason and remedy."""
    from rich.table import Column, Table
    from rich.text import Text

    wrong = [
        (card, line) for card in cards for line in card.attacks if line.verdict is not Verdict.HELD
    ]
    if not wrong:
        return
    columns = ("wall", "attack", "it tried to", "why")
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for card, line in wrong:
        why = printable(f"{line.why} {line.cure}".strip())
        style = COLOURS[line.verdict]
        table.add_row(card.name, Text(line.id, style=style), Text(line.tries), Text(why))
    console.print(table)


def _show_differences(console: Console, cards: Sequence[WallCard]) -> None:
    from rich.text import Text

    for card in cards:
        for line in card.attacks:
            if line.differs:
                said = visible(f"* {card.name}, {line.id}: {line.differs}")
                console.print(Text(said, style="dim"))


def _summary(card: WallCard) -> Text:
    from rich.text import Text

    if not card.attacks:
        said = "not available" if card.verdict is Verdict.ABSENT else "could not be tried"
        words = printable(f"{card.name}: {said}. {card.why} {card.cure}".rstrip())
        return Text(words, style=COLOURS[card.verdict])
    counts = ", ".join(
        f"{card.count(verdict)} {words}" for verdict, words in SHOWN.items() if card.count(verdict)
    )
    return Text(f"{card.name}: {counts}, in {card.seconds} s", style=COLOURS[card.verdict])
