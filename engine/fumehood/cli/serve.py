"""`fumehood serve`: run the daemon in the foreground."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import counted
from fumehood.cli.reach import read_config, read_control_path, read_socket_path

if TYPE_CHECKING:
    from fumehood.config import Config

MIN_CALLS_IN_FOREGROUND = 100
"""`alerts.min_calls` while a person watches the log on a terminal."""


def serve(
    socket: Annotated[
        Path | None,
        typer.Option(help="The socket; default: FUMEHOOD_SOCKET or the runtime directory."),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="The state directory; default: FUMEHOOD_HOME.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the web console, too, on this machine.")
    ] = False,
    web_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port of the console; 0 chooses one.")
    ] = 8420,
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
        # The next opened file would get its descriptor, and the log would go into that file.
        fail("Standard error is closed, and the log goes there.", ExitCode.UNAVAILABLE)
    config = read_config(socket=socket, home=home, log_level=log_level)
    path = read_socket_path(config)
    level: str = config.log_level
    if sys.stderr.isatty():
        _greet(config)
        if "log_level" not in config.model_fields_set:
            level = "warning"  # for a person: the credential must not scroll away
        config = in_foreground(config)
    log = make_logger(level, config.log_format)

    console: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
    if web:
        from fumehood.cli.web import console_of

        console = console_of(read_control_path(config), path, web_port)

    def say_ready() -> None:
        start_console()
        with suppress(OSError):  # stderr has no reader any more, as with the log
            print(f"fumehood listens on {path}", file=sys.stderr, flush=True)

    async def main() -> None:
        await run(
            config, log, show_credential=_way_to_show(), on_ready=say_ready,
            on_draining=lambda count: _say_what_it_waits_for(count, config.drain_seconds),
        )  # fmt: skip

    try:
        with console as start_console:
            anyio.run(main)
    except (StoreError, ConfigError, PolicyError) as error:
        fail(str(error), ExitCode.UNAVAILABLE)


def _greet(config: Config) -> None:
    """Print four lines for a person, before the log's warnings."""
    from importlib.metadata import version

    example = """fumehood call calculator '{"expression": "5! + 2**10"}'"""
    say(
        f"fumehood {version('fumehood')}: sandboxed tool execution for AI agents. Ctrl-C stops it."
        f"\nSockets: {read_socket_path(config)} (calls), {read_control_path(config)} (approvals)."
        f"\nIn another terminal{_variable(config)}: {example}"
        "\nAgents, over MCP: fumehood mcp --session new --socket "
        f"{shlex.quote(str(read_socket_path(config)))}",
        to_stderr=True,
    )


def in_foreground(config: Config) -> Config:
    """Raise the calls that an alert needs, unless they are configured: a few tries are no trend."""
    if "min_calls" in config.alerts.model_fields_set:
        return config
    alerts = config.alerts.model_copy(update={"min_calls": MIN_CALLS_IN_FOREGROUND})
    return config.model_copy(update={"alerts": alerts})


def _say_what_it_waits_for(count: int, seconds: float) -> None:
    """Tell a person why Ctrl-C has not ended the command yet."""
    if sys.stderr.isatty() and seconds:
        say(
            f"Waiting for {counted(count, 'call')} to end (at most {seconds:g} s); Ctrl-C again "
            "stops at once.",
            to_stderr=True,
        )


def _variable(config: Config) -> str:
    """The variable that another terminal must set if the engine is not in its usual place."""
    if config.socket is not None:
        name, value = "FUMEHOOD_SOCKET", config.socket
    elif config.home is not None:
        name, value = "FUMEHOOD_HOME", config.home
    else:
        return ""
    return f" (after: export {name}={shlex.quote(str(value.absolute()))})"


def _way_to_show() -> Callable[[str], None] | None:
    """Return a function that shows a credential on the terminal, or None without one."""
    streams = (sys.stdin, sys.stderr)
    if not all(stream is not None and stream.isatty() for stream in streams):
        return None

    def show(credential: str) -> None:
        print(
            "This is the credential of the first approver, you. It is shown only once; keep it in "
            f"a password manager, where no agent can read it:\n\n    {credential}\n",
            file=sys.stderr,
            flush=True,
        )

    return show


def _load_structlog() -> None:
    """Import structlog without rich, which it loads for coloured tracebacks that the log never has.

    This saves an idle daemon 4 MB. Only done here, where the process is only the daemon.
    """
    if "rich" in sys.modules:
        return
    # None makes Python raise ImportError for the module.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
