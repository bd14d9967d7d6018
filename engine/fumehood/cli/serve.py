"""`fumehood serve`: run the daemon in the foreground."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.escaping import say
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.settings import read_config, read_control_path, read_socket_path

if TYPE_CHECKING:
    from fumehood.config import Config


def serve(
    socket: Annotated[
        Path | None,
        typer.Option(help="The socket; default: FUMEHOOD_SOCKET or the runtime directory."),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Where the engine keeps its files; default: FUMEHOOD_HOME.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error; default: info, on a terminal warning."),
    ] = None,
) -> None:
    """Run the engine as a daemon until SIGTERM or Ctrl-C."""
    import anyio

    _load_structlog()
    from fumehood.config import ConfigError
    from fumehood.http.server import serve as run
    from fumehood.observe.log import make_logger
    from fumehood.policy.model import PolicyError
    from fumehood.storage.errors import StoreError

    if sys.stderr is None:
        # Its number would go to the next file that is opened, and the log into that file.
        fail("Standard error is closed, and the log goes there.", ExitCode.UNAVAILABLE)
    config = read_config(socket=socket, home=home, log_level=log_level)
    path = read_socket_path(config)
    level: str = config.log_level
    if sys.stderr.isatty():
        _greet(config)
        if "log_level" not in config.model_fields_set:
            level = "warning"  # a person reads: the credential must not scroll away
    log = make_logger(level, config.log_format)

    def say_ready() -> None:
        with suppress(OSError):  # nobody reads any more, as with the log
            print(f"fumehood listens on {path}", file=sys.stderr, flush=True)

    async def main() -> None:
        await run(config, log, show_credential=_way_to_show(), on_ready=say_ready)

    try:
        anyio.run(main)
    except (StoreError, ConfigError, PolicyError) as error:
        fail(str(error), ExitCode.UNAVAILABLE)


def _greet(config: Config) -> None:
    """Print three lines for a person; warnings of the log follow."""
    from importlib.metadata import version

    example = """fumehood call calculator '{"expression": "5! + 2**10"}'"""
    say(
        f"fumehood {version('fumehood')}: sandboxed tool execution for AI agents. Ctrl-C stops it."
        f"\nSockets: {read_socket_path(config)} (calls), {read_control_path(config)} (approvals)."
        f"\nNext, in another terminal{_variable(config)}: {example}; "
        "approvals: fumehood approvals list",
        to_stderr=True,
    )


def _variable(config: Config) -> str:
    """What another terminal needs to find this engine, where that is not at its usual place."""
    if config.socket is not None:
        name, value = "FUMEHOOD_SOCKET", config.socket
    elif config.home is not None:
        name, value = "FUMEHOOD_HOME", config.home
    else:
        return ""
    return f" (after: export {name}={shlex.quote(str(value.absolute()))})"


def _way_to_show() -> Callable[[str], None] | None:
    """What shows a credential to the person at the terminal; None without a terminal."""
    streams = (sys.stdin, sys.stderr)
    if not all(stream is not None and stream.isatty() for stream in streams):
        return None

    def show(credential: str) -> None:
        print(
            "This is the credential of the first approver, you. It is shown only now; keep it in "
            f"a password manager, where no agent can read it:\n\n    {credential}\n",
            file=sys.stderr,
            flush=True,
        )

    return show


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
