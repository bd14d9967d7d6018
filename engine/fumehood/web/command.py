"""The command `fumehood web`, which serves the console, and the option `fumehood serve --web`,
which serves the console from a child process of the daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import ControlSocketPath, CredentialStdin
from fumehood.cli.reach import EITHER, checked_credential, find_socket
from fumehood.cli.serve import Companion, Sockets

if TYPE_CHECKING:
    import socket as socket_module

    from fumehood.web.app import Console

DEFAULT_PORT = 8420
RESTART_S = 2.0
"""Seconds before a console whose process has ended is started again."""

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
            if open_browser:  # in a thread, because some browsers block their caller
                threading.Thread(target=_open, args=(link, Path(private)), daemon=True).start()

        run(listener, path, find_socket(), on_ready=say_ready)


def _open(link: str, directory: Path) -> None:
    """Open the login link in a browser. If this is not possible, print a message.

    The link is written to a file in `directory`, and the browser opens this file. Only this user
    must have access to the directory.
    """
    import webbrowser

    # The link is secret, and every user can see the arguments of the browser's process.
    page = directory / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={link}">', encoding="utf-8")
    if not webbrowser.open(page.as_uri()):
        print("No browser could be opened here.", flush=True)


def listening(port: int, option: str = "--port") -> socket_module.socket:
    """Return a socket that listens for browsers on a port of this machine. If the port cannot be
    used, end the command with a message that names `option`, the option that chooses another port.
    """
    from fumehood.web.server import listen

    try:
        return listen(port)
    except OSError as error:
        fail(
            f"The port {port} of this machine cannot be used: {error.strerror}. Choose another one "
            f"with {option}, or stop the program that has it.",
            ExitCode.UNAVAILABLE,
        )


def beside(
    web: Annotated[
        bool, typer.Option("--web", help="Serve the web console, too, on this machine.")
    ] = False,
    web_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port of the console; 0 chooses one.")
    ] = DEFAULT_PORT,
) -> Companion | None:
    """Return the function that runs a console alongside a daemon, or None if the option `--web` is
    not given.
    """
    return partial(console_of, web_port) if web else None


@contextmanager
def console_of(
    port: int, sockets: Sockets, is_stopping: threading.Event
) -> Iterator[Callable[[], None]]:
    """Yield a function that starts a console in a child process. When the block is left, the
    console ends.

    `port` is the local port that browsers use. `sockets` are the paths of the daemon's sockets. The
    console starts without logins, so each user must enter a credential.

    If the console's process ends, it is started again, unless `is_stopping` is set. Leaving the
    block sets `is_stopping`.
    """
    children: list[subprocess.Popen[bytes]] = []
    with listening(port, "--web-port") as listener:
        given = [str(one) for one in (listener.fileno(), sockets.control, sockets.callers)]
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
                # It is set if Ctrl-C or a service manager ends both processes.
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
