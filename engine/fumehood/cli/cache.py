"""`fumehood cache show|clear`: the result cache of the running engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fumehood.cli.plain import as_fields, as_text, plain

if TYPE_CHECKING:
    from fumehood.cache.model import ClearedCache

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
