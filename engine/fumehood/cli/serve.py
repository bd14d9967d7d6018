"""`fumehood serve` runs the daemon in the foreground, `fumehood web` the console for a browser."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import ControlSocketPath, CredentialStdin, counted
from fumehood.cli.reach import (
    EITHER,
    checked_credential,
    find_socket,
    read_config,
    read_socket_path,
)

if TYPE_CHECKING:
    import socket as sockets

    from fumehood.config import Config
    from fumehood.web.app import Console


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
    cluster: Annotated[
        str | None,
        typer.Option(help="Use the nodes of a Ray cluster: its head's HOST:PORT, or auto."),
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
    config = read_config(
        socket=socket,
        home=home,
        log_level=log_level,
        state=state and {"url": state},
        files=files and {"url": files},
        cluster=cluster and {"address": cluster},
    )
    path = read_socket_path(config)
    level: str = config.log_level
    if sys.stderr.isatty():
        _greet(config)
        if "log_level" not in config.model_fields_set:
            level = "warning"  # for a person: the credential must not scroll away
        config = in_foreground(config)
    log = make_logger(level, config.log_format)

    console: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
    is_stopping = threading.Event()
    if web:
        control = read_socket_path(config, control=True)
        console = console_of(control, path, web_port, is_stopping)

    def say_ready() -> None:
        start_console()
        with suppress(OSError):  # stderr has no reader any more, as with the log
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
        with console as start_console:
            anyio.run(main)
    except (StoreError, ConfigError, PolicyError) as error:
        fail(str(error), ExitCode.UNAVAILABLE)


def _greet(config: Config) -> None:
    """Print four lines for a person, before the log's warnings."""
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
    """Raise the calls that an alert needs, unless they are configured: a few tries are no trend."""
    if "min_calls" in config.alerts.model_fields_set:
        return config
    alerts = config.alerts.model_copy(update={"min_calls": MIN_CALLS_IN_FOREGROUND})
    return config.model_copy(update={"alerts": alerts})


def _say_what_it_waits_for(count: int, seconds: float) -> None:
    """Say why Ctrl-C has not ended the command yet."""
    if sys.stderr.isatty() and seconds:
        say(
            f"Waiting for {counted(count, 'call')} to end (at most {seconds:g} s); Ctrl-C again "
            "stops at once.",
            to_stderr=True,
        )


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

    This saves an idle daemon 4 MB. Only for this process, which is only the daemon.
    """
    if "rich" in sys.modules:
        return
    # None makes Python raise ImportError for the module.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


DEFAULT_PORT = 8420
RESTART_S = 2.0
"""Seconds before a console that ended is started again."""

Port = Annotated[
    int, typer.Option(min=0, max=65_535, help="The port on this machine; 0 chooses one.")
]


def web(
    port: Port = DEFAULT_PORT,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Serve the inbox and the console to a browser on this machine, until Ctrl-C."""
    from fumehood.web.server import protect, run

    with listening(port) as listener, TemporaryDirectory(prefix="fumehood-") as private:
        protect()
        path, credential, who = checked_credential(
            socket, credential_stdin=credential_stdin, scope=EITHER
        )

        def say_ready(console: Console) -> None:
            link = console.link(credential)
            print(
                f"The console listens on http://127.0.0.1:{console.port} for "
                f"{who.principal_id.removeprefix('approver:')}. Ctrl-C stops it.\n"
                f"Open this link within 5 minutes. It works once:\n\n    {link}\n",
                flush=True,
            )
            if open_browser:  # beside the server, because some browsers hold their caller
                threading.Thread(target=_open, args=(link, Path(private)), daemon=True).start()

        run(listener, path, find_socket(), on_ready=say_ready)


def _open(link: str, directory: Path) -> None:
    """Open the link from a page that only this user can read: every user can see arguments."""
    import webbrowser

    page = directory / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={link}">', encoding="utf-8")
    if not webbrowser.open(page.as_uri()):
        print("No browser could be opened here.", flush=True)


def listening(port: int, option: str = "--port") -> sockets.socket:
    """Listen for browsers, or end the command with the reason."""
    from fumehood.web.server import listen

    try:
        return listen(port)
    except OSError as error:
        fail(
            f"The port {port} of this machine cannot be used: {error.strerror}. Choose another one "
            f"with {option}, or stop the program that has it.",
            ExitCode.UNAVAILABLE,
        )


@contextmanager
def console_of(
    control: Path, callers: Path, port: int, is_stopping: threading.Event
) -> Iterator[Callable[[], None]]:
    """Run a console beside a daemon; the function starts it. It ends with this context.

    Nobody is logged in there: each browser needs a credential. If it ends it is started again,
    unless the daemon is stopping: Ctrl-C and service managers end both.
    """
    children: list[subprocess.Popen[bytes]] = []
    with listening(port, "--web-port") as listener:
        given = [str(one) for one in (listener.fileno(), control, callers)]
        # The console must not see the daemon's variables.
        known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}

        def run() -> None:
            while True:
                # -P: nothing is imported from the directory in which the daemon was started.
                child = subprocess.Popen(  # noqa: S603 - our own program
                    [sys.executable, "-P", "-m", "fumehood.web.server", *given],
                    cwd="/", env=known, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()],
                )  # fmt: skip
                children[:] = [child]
                status = child.wait()
                if is_stopping.wait(RESTART_S):
                    return
                words = f"The console ended ({status}); it is started again."
                print(words, file=sys.stderr, flush=True)

        # The thread lives as long as the process: the console ends with the thread that made it.
        keeper = threading.Thread(target=run, daemon=True)

        def start() -> None:
            keeper.start()
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            print(f"The console listens on {address}", file=sys.stderr, flush=True)

        try:
            yield start
        finally:
            is_stopping.set()
            while keeper.is_alive():
                for child in children:
                    child.terminate()
                keeper.join(0.1)
