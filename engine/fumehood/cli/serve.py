"""`fumehood serve`: run the daemon in the foreground."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import counted
from fumehood.cli.reach import read_config, read_socket_path
from fumehood.core.part import imported
from fumehood.parts import parts

if TYPE_CHECKING:
    from fumehood.config import Config


@dataclass(frozen=True, slots=True)
class Sockets:
    """The paths of the daemon's sockets."""

    callers: Path
    control: Path


Companion = Callable[[Sockets, threading.Event], AbstractContextManager[Callable[[], None]]]
"""Returns a context in which something else, such as another server, runs alongside the daemon. The
context yields a function, which is called once the daemon is ready. The event is set when the
daemon begins to stop."""

Settings = Mapping[str, object]
"""Configuration keys and values that an option sets."""


def serve(
    socket: Annotated[
        Path | None,
        typer.Option(help="The socket; default: FUMEHOOD_SOCKET or the runtime directory."),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="The state directory; default: FUMEHOOD_HOME.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="A PostgreSQL database for the state: postgresql://USER@HOST/DATABASE."),
    ] = None,
    files: Annotated[
        str | None,
        typer.Option(
            help="A directory, or s3://BUCKET/PREFIX, for blobs and recordings that a standby "
            "shares."
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error; default: info, on a terminal warning."),
    ] = None,
    added: Sequence[Companion | Settings | None] = (),
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
    config = read_config(
        socket=socket,
        home=home,
        log_level=log_level,
        state=state and {"url": state},
        files=files and {"url": files},
        **{key: value for one in added if isinstance(one, Mapping) for key, value in one.items()},
    )
    path = read_socket_path(config)
    level: str = config.log_level
    if sys.stderr.isatty():
        _greet(config)
        if "log_level" not in config.model_fields_set:
            level = "warning"  # for a person: the credential must not scroll away
        config = in_foreground(config)
    log = make_logger(level, config.log_format)

    is_stopping = threading.Event()
    sockets = Sockets(path, read_socket_path(config, control=True))
    companions = [one for one in added if one is not None and not isinstance(one, Mapping)]
    starts: list[Callable[[], None]] = []

    def say_ready() -> None:
        for start in starts:
            start()
        with suppress(OSError):  # nobody reads stderr any more; the log ignores that as well
            print(f"fumehood listens on {path}", file=sys.stderr, flush=True)

    def on_draining(count: int) -> None:
        is_stopping.set()
        if count:
            _say_what_it_waits_for(count, config.drain_seconds)

    async def main() -> None:
        await run(
            config, log, show_credential=_way_to_show(), on_ready=say_ready,
            on_draining=on_draining,
        )  # fmt: skip

    try:
        with ExitStack() as stack:
            starts += [stack.enter_context(beside(sockets, is_stopping)) for beside in companions]
            anyio.run(main)
    except (StoreError, ConfigError, PolicyError) as error:
        fail(str(error), ExitCode.UNAVAILABLE)


def _greet(config: Config) -> None:
    """Print four lines for the user at the terminal: the version, the sockets, a command to try,
    and the command that connects agents. They appear before any warnings of the log.
    """
    from importlib.metadata import version

    socket = read_socket_path(config)
    named = f"--socket {shlex.quote(str(socket))}"
    say(
        f"fumehood {version('fumehood')}: sandboxed tool execution for AI agents. Ctrl-C stops it."
        f"\nSockets: {socket} (calls), {read_socket_path(config, control=True)} (approvals)."
        f"\nIn another terminal: fumehood call {named} calculator "
        """'{"expression": "5! + 2**10"}'"""
        f"\nAgents, over MCP: fumehood mcp --session new {named}",
        to_stderr=True,
    )


def in_foreground(config: Config) -> Config:
    """Return the configuration for a daemon that runs on a terminal, including the changes that
    parts make.
    """
    for part in parts():
        if part.in_foreground is not None:
            config = imported(part.in_foreground)(config)
    return config


def _say_what_it_waits_for(count: int, seconds: float) -> None:
    """If stderr is a terminal, explain why Ctrl-C has not ended the command yet: `count` calls are
    running, and the engine waits for them for up to `seconds`.
    """
    if sys.stderr.isatty() and seconds:
        say(
            f"Waiting for {counted(count, 'call')} to end (at most {seconds:g} s); Ctrl-C again "
            "stops at once.",
            to_stderr=True,
        )


def _way_to_show() -> Callable[[str], None] | None:
    """Return a function that shows a credential on the terminal. Return None if standard input and
    standard error are not both a terminal.
    """
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
    """Import structlog, and prevent it from importing rich. An idle daemon then needs 4 MB less
    memory.

    Only this process is affected, which runs nothing but the daemon.
    """
    if "rich" in sys.modules:
        return
    # structlog would import rich to colour tracebacks, which the engine's log never contains.
    # None makes Python raise ImportError for the module.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
