"""`fumehood doctor --attack`: run the attacks, and show the scorecard."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

import anyio
import typer

from fumehood.attack.attack import Topic
from fumehood.attack.bait import BaitFailed
from fumehood.attack.run import run_attacks
from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard
from fumehood.attack.targets import IN_CONTAINERS, WALLS, targets_of
from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.show import Column, show_json, show_table, wants_json
from fumehood.core.escaping import visible

EXITS = {
    Verdict.HELD: ExitCode.SUCCESS,
    Verdict.FAILED: ExitCode.TOOL_FAILED,
    Verdict.UNTRIED: ExitCode.UNAVAILABLE,
}
SHOWN = {Verdict.HELD: "held", Verdict.FAILED: "FAILED", Verdict.UNTRIED: "not tried"}


def instead(
    attack: Annotated[
        bool,
        typer.Option(
            "--attack",
            help="Attack this host's own walls, safely, and show which held. Exit status 0: all "
            "held; 1: one failed; 4: one that should be here could not be tried.",
        ),
    ] = False,
    wall: Annotated[
        list[str] | None,
        typer.Option(help="Attack this only: interpreter, jail, container or gateway. Repeatable."),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Attack only this: a runtime of Docker, `direct`, `gvisor` or `landlock`."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few attacks of each kind, in at most about 15 s.")
    ] = False,
    *,
    show_parts: bool,
    as_json: bool,
) -> None:
    """With `--attack`, attack the walls and end the command. Otherwise return, so that the command
    examines the host.

    The exit code is that of the scorecard's verdict.
    """
    if show_parts:
        return
    if attack:
        scorecard = _scorecard_of(wall or [], runtime, quick=quick)
        if wants_json(as_json):
            show_json(scorecard.as_document())
        else:
            _show_scorecard(scorecard)
        raise typer.Exit(EXITS[scorecard.verdict])
    if wall or runtime is not None or quick:
        fail("--wall, --runtime and --quick need --attack.", ExitCode.USAGE)


def _scorecard_of(walls: Sequence[str], runtime: str | None, *, quick: bool) -> Scorecard:
    unknown = [wall for wall in walls if wall not in WALLS]
    if unknown:
        fail(f"{unknown[0]!r} is not a wall: {', '.join(WALLS)}.", ExitCode.USAGE)
    if runtime is not None and walls and not {*IN_CONTAINERS} & {*walls}:
        fail("--runtime needs the container wall, or the gateway.", ExitCode.USAGE)
    chosen = tuple(walls) or (WALLS if runtime is None else IN_CONTAINERS)
    try:
        scorecard = anyio.run(_attack_until_told, chosen, runtime, quick)
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
    """Run the attacks. Return the scorecard, or None if a signal ended the attacks early. In both
    cases, the walls and the bait are removed.
    """
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
    """Return a function that shows the current attack on stderr if stderr is a terminal, and
    otherwise does nothing.
    """
    if not sys.stderr.isatty():
        return lambda wall, line: None

    def tell(wall: str, line: Line) -> None:
        sys.stderr.write(f"\r\x1b[K{wall}: {line.id}")
        sys.stderr.flush()

    return tell


# -- the table --------------------------------------------------------------------------


def _show_scorecard(scorecard: Scorecard) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    tried = [card for card in scorecard.walls if card.attacks]
    if tried:
        _show_matrix(tried)
    for card in tried:
        _show_remarks(card)
    for card in scorecard.walls:
        say(_summary(card))


def _show_matrix(cards: Sequence[WallCard]) -> None:
    by_wall = [{line.id: line for line in card.attacks} for card in cards]
    topics = {name: Topic(line.topic) for lines in by_wall for name, line in lines.items()}
    fields = [Column("topic", drop=1), Column("attack", whole=True)]
    fields += [Column(card.name) for card in cards]
    rows = [
        [topic, name, *(_cell(lines.get(name)) for lines in by_wall)]
        for topic in Topic
        for name in topics
        if topics[name] is topic
    ]
    show_table(fields, rows)


def _cell(line: Line | None) -> str:
    if line is None:
        return "·"
    return f"{SHOWN[line.verdict]}{'*' if line.differs else ''}"


def _show_remarks(card: WallCard) -> None:
    """Print the reason and the remedy for each attack that the wall did not withstand or that was
    not tried.

    Under some container runtimes, an attack ends differently than usual without a weakness of the
    wall. For each such attack, also print why the difference is no weakness.
    """
    for line in card.attacks:
        if line.verdict is not Verdict.HELD:
            said = f"{SHOWN[line.verdict]}: it tried to {line.tries}. {line.why} {line.cure}"
            say(f"{card.name}, {line.id}: {said}")
        if line.differs:
            say(visible(f"* {card.name}, {line.id}: {line.differs}"))


def _summary(card: WallCard) -> str:
    if not card.attacks:
        said = "not available" if card.verdict is Verdict.ABSENT else "could not be tried"
        return f"{card.name}: {said}. {card.why} {card.cure}"
    counts = ", ".join(
        f"{card.count(verdict)} {words}" for verdict, words in SHOWN.items() if card.count(verdict)
    )
    grade = f" (grade {card.grade})" if card.grade is not None else ""
    return f"{card.name}{grade}: {counts}, in {card.seconds} s"
