"""`fumehood web`: the inbox and the console in a browser on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import ControlSocketPath, CredentialStdin
from fumehood.cli.reach import EITHER, checked_credential, find_socket

if TYPE_CHECKING:
    import socket as sockets

    from fumehood.web.app import Console

DEFAULT_PORT = 8420
RESTART_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a console that ended is started again."""
STEADY_S = 60.0
"""A console that ran for so long did not fail at its start."""

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
    """Open the link from a page that only this user can read: arguments are seen by everybody."""
    import webbrowser

    page = directory / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={link}">', encoding="utf-8")
    if not webbrowser.open(page.as_uri()):
        print("No browser could be opened here.", flush=True)


def listening(port: int, option: str = "--port") -> sockets.socket:
    """Listen for browsers, or end the command."""
    from fumehood.web.server import listen

    try:
        return listen(port)
    except OSError as error:
        fail(
            f"The port {port} of this machine cannot be used: {error.strerror}. Choose another one "
            f"with {option}, or stop the program that has it.",
            ExitCode.UNAVAILABLE,
        )


def keep_running(
    run: Callable[[], int],
    pause: Callable[[float], bool],
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run a console again whenever it ends, until a pause says that this is over.

    The pause doubles while consoles end soon, and only the first of such ends is told.
    """
    pause_s = RESTART_S
    while True:
        began = now()
        status = run()
        if now() - began >= STEADY_S:
            pause_s = RESTART_S
        if pause(pause_s):
            return
        if pause_s == RESTART_S:
            words = f"The console ended ({status}); it is started again, each time a little later."
            print(words, file=sys.stderr, flush=True)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@contextmanager
def console_of(control: Path, callers: Path, port: int) -> Iterator[Callable[[], None]]:
    """A console beside a daemon; the function starts it. It ends with this block.

    Nobody is logged in there: each browser needs a credential. It is started again where it ends.
    """
    children: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()
    with listening(port, "--web-port") as listener:

        def run() -> int:
            given = map(str, (listener.fileno(), control, callers))
            # The daemon's variables are not the console's to know.
            known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
            # -P: nothing is imported from the directory in which the daemon was started.
            child = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-P", "-m", "fumehood.web", *given],
                cwd="/",
                env=known,
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
            children[:] = [child]
            return child.wait()

        # The thread lives as long as the process, of whose end the console is told.
        keeper = threading.Thread(target=keep_running, args=(run, is_over.wait), daemon=True)

        def start() -> None:
            keeper.start()
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            print(f"The console listens on {address}", file=sys.stderr, flush=True)

        try:
            yield start
        finally:
            is_over.set()
            while keeper.is_alive():
                for child in children:
                    child.terminate()
                keeper.join(0.1)
