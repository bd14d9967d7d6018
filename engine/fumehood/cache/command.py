"""The command `fumehood cache`, for the result cache of the running engine."""

from __future__ import annotations

import typer

from fumehood.cli.plain import plain
from fumehood.cli.show import as_fields, as_text
from fumehood.core.status import ClearedCache

cache = typer.Typer(help="The result cache of the running engine.", no_args_is_help=True)

plain(
    cache, "cache.show", "Show its size, hits and misses. Needs a credential with admin.", as_fields
)


@as_text
def _dropped(done: ClearedCache) -> None:
    print(f"{done.cleared} answers were dropped.")


plain(
    cache,
    "cache.clear",
    "Drop every cached answer, of all principals. Needs a credential with admin.",
    _dropped,
)
