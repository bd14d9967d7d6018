"""`fumehood serve`: run the daemon in the foreground."""

from __future__ import annotations

import sys
from contextlib import suppress
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

    _load_structlog()
    from fumehood.config import ConfigError
    from fumehood.daemon.server import serve as run
    from fumehood.model.policy import PolicyError
    from fumehood.observe.log import make_logger
    from fumehood.store.errors import StoreError

    if sys.stderr is None:
        # Its number would go to the next file that is opened, and the log into that file.
        fail("Standard error is closed, and the log goes there.", ExitCode.UNAVAILABLE)
    config = read_config(socket=socket, home=home, log_level=log_level)
    path = read_socket_path(config)
    log = make_logger(config.log_level, config.log_format)

    def say_ready() -> None:
        with suppress(OSError):  # nobody reads any more, as with the log
            print(f"fumehood listens on {path}", file=sys.stderr, flush=True)

    async def main() -> None:
        await run(config, log, on_ready=say_ready)

    try:
        anyio.run(main)
    except (StoreError, ConfigError, PolicyError) as error:
        fail(str(error), ExitCode.UNAVAILABLE)


def _load_structlog() -> None:
    """Without rich, which it would load for tracebacks in colour, and no line of the log has one.

    That is 4 MB of an idle daemon. Only here, where the process is the daemon's alone.
    """
    if "rich" in sys.modules:
        return
    # Python's own way to say that a module is not there.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
