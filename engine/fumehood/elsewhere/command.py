"""`fumehood state`: copy the state of a stopped engine."""

from __future__ import annotations

from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail, say

state = typer.Typer(help="The state of a stopped engine.", no_args_is_help=True)

Place = "a state directory, sqlite:///FILE or postgresql://USER@HOST/DATABASE"


@state.command("copy")
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help=f"The present state: {Place}.")],
    target: Annotated[str, typer.Argument(metavar="TO", help=f"An empty database: {Place}.")],
) -> None:
    """Copy the state of a stopped engine to another database, and compare both."""
    from fumehood.elsewhere.copying import copy_state
    from fumehood.storage.errors import StoreError

    try:
        counts = copy_state(source, target)
    except StoreError as error:
        fail(str(error), ExitCode.UNAVAILABLE)
    for name, count in counts.items():
        if count:
            say(f"{count:>9} {name}")
    say(
        f"Copied {sum(counts.values())} rows, and compared them. Keys, blobs and recordings stay "
        "in the state directory: start the engine there, with --state."
    )
