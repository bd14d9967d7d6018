"""`fumehood serve`: run the daemon in the foreground."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.settings import read_config, read_socket_path


def serve(
    socket: Annotated[
        Path | None,
        typer.Option(help="The socket; default: FUMEHOOD_SOCKET or the runtime directory."),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Where the engine keeps its files; default: FUMEHOOD_HOME.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the engine as a daemon until SIGTERM or Ctrl-C."""
    import anyio

    from fumehood.config import ConfigError
    from fumehood.daemon.server import serve as run
    from fumehood.observe.log import make_logger
    from fumehood.store.errors import StoreError

    config = read_config(socket=socket, home=home, log_level=log_level)
    path = read_socket_path(config)
    log = make_logger(config.log_level, config.log_format)

    async def main() -> None:
        await run(
            config,
            log,
            on_ready=lambda: print(f"fumehood listens on {path}", file=sys.stderr, flush=True),
        )

    try:
        anyio.run(main)
    except (StoreError, ConfigError) as error:
        fail(str(error), ExitCode.UNAVAILABLE)
