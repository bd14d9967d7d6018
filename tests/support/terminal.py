"""Somebody at a terminal, who reads and types."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from conftest import FUMEHOOD
from support.wait import DEADLINE_S

CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x07")
"""What a screen is drawn with: it is not seen."""


def on_a_terminal(
    environment: dict[str, str],
    *arguments: str,
    typed: str = "",
    cwd: Path | None = None,
    columns: int = 80,
    term: str = "dumb",
) -> tuple[int, str]:
    """The exit status of a command, and what a terminal gets from it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(FUMEHOOD), *arguments], cwd=cwd,
        env={**environment, "TERM": term, "COLUMNS": str(columns)},
        stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    assert process.stdin is not None
    process.stdin.write(typed.encode())
    process.stdin.close()
    seen = b""
    with suppress(OSError):  # EIO: the other side has closed
        while chunk := os.read(ours, 65536):
            seen += chunk
    os.close(ours)
    return process.wait(timeout=60), seen.decode()


class Person:
    """Somebody at a terminal of 80 columns, who types when asked."""

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
        """What is shown up to this."""
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
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        return self.leaves()

    def leaves(self) -> int:
        with suppress(OSError):
            while chunk := os.read(self._ours, 65536):
                self.seen += chunk.decode()
        os.close(self._ours)
        return self.process.wait(timeout=60)


class Watcher:
    """Somebody at a real terminal, with a process group of its own, who reads a full screen."""

    def __init__(
        self, environment: dict[str, str], *arguments: str, size: tuple[int, int] = (80, 24)
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._theirs = theirs
        """Kept open, so that the modes of the terminal can be seen after the command."""
        self.resizes(*size)
        self._modes = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", str(FUMEHOOD), *arguments],
            env={**environment, "TERM": "xterm-256color"},
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def types(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resizes(self, columns: int, rows: int) -> None:
        """The terminal becomes so large; its foreground process gets SIGWINCH."""
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    @property
    def screen(self) -> list[str]:
        """The rows of the last whole frame, as they are seen."""
        frames = self.seen.split("\x1b[H")
        return [row.rstrip() for row in CONTROLS.sub("", frames[-1]).split("\r\n")]

    def reads(self, *words: str) -> list[str]:
        """Wait until all of these are on the screen."""
        self.until(lambda: all(word in " ".join(self.screen) for word in words))
        return self.screen

    def until(self, condition: Callable[[], object]) -> None:
        """Read on until this is so."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, self.seen[-4000:]
            self.seen += self._decoder.decode(os.read(self._ours, 65536))

    def has_ended(self) -> int:
        """Wait for the end; its exit status. The terminal is as it was."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.seen[-4000:]
            if select.select([self._ours], [], [], 0.05)[0]:
                self.seen += self._decoder.decode(os.read(self._ours, 65536))
        while select.select([self._ours], [], [], 0)[0]:
            self.seen += self._decoder.decode(os.read(self._ours, 65536))
        assert termios.tcgetattr(self._theirs) == self._modes
        if "\x1b[?1049h" in self.seen:
            assert self.seen.rindex("\x1b[?1049l") > self.seen.rindex("\x1b[?1049h")
            assert self.seen.rindex("\x1b[?25h") > self.seen.rindex("\x1b[?25l")
        os.close(self._ours)
        os.close(self._theirs)
        return self.process.returncode
