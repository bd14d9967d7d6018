"""`fumehood serve --cluster`. This module imports little, because every daemon loads it."""

from __future__ import annotations

from typing import Annotated

import typer

from fumehood.cli.serve import Settings


def with_nodes(
    cluster: Annotated[
        str | None,
        typer.Option(help="Use the nodes of a Ray cluster: its head's HOST:PORT, or auto."),
    ] = None,
) -> Settings | None:
    """Return the cluster's settings from the option, or None if the option is missing."""
    return {"cluster": {"address": cluster}} if cluster else None
