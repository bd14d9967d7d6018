"""A simulated person at a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from conftest import FUMEHOOD


def on_a_terminal(
    environment: dict[str, str],
    *arguments: str,
    typed: str = "",
    cwd: Path | None = None,
    columns: int = 80,
    term: str = "dumb",
) -> tuple[int, str]:
    """Run a command on a terminal; return its exit status and output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(FUMEHOOD), *arguments], cwd=cwd,
        env={**environment, "TERM": term, "COLUMNS": str(columns)},
        stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    process.stdin.write(typed.encode())
    process.stdin.close()
    seen = b""
    with suppress(OSError):  # EIO: the other side has closed
        while chunk := os.read(ours, 65536):
            seen += chunk
    os.close(ours)
    return process.wait(timeout=600), seen.decode()


class Person:
    """A person at a terminal of 80 columns, who types on request."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [str(FUMEHOOD), *arguments], start_new_session=True,
            env={**environment, "TERM": "dumb", "COLUMNS": "80"},
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def reads(self, what: str) -> str:
        """Read until this text appears; return the output so far."""
        while what not in self.seen:
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # EIO: the other side has closed
                chunk = b""
            assert chunk, self.seen
            self.seen += chunk.decode()
        return self.seen

    def types(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def interrupts(self) -> int:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        return self.leaves()

    def leaves(self) -> int:
        with suppress(OSError):
            while chunk := os.read(self._ours, 65536):
                self.seen += chunk.decode()
        os.close(self._ours)
        return self.process.wait(timeout=600)
