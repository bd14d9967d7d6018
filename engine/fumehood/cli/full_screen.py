"""The whole terminal for one command: lines to draw, keys one at a time, an editor in between.

Invariant: whatever ends the command (an exception, Ctrl-C, SIGTERM, a closed terminal), the
terminal is given back as it was.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fumehood.cli.approval_output import STYLES
from fumehood.cli.approval_view import Line

ESCAPE_S = 0.05
"""How long the rest of a key's sequence may take, over a slow line."""

KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "page up",
    "\x1b[6~": "page down", "\x1b": "escape", "\n": "enter", "\x7f": "backspace",
    "\b": "backspace", "\x15": "erase",
}  # fmt: skip
"""*Source*: xterm's control sequences, "PC-Style Function Keys"; Ctrl-U erases."""

_KEY = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|O.)|.", re.DOTALL)
_UNFINISHED = re.compile(r"\x1b(\[[0-9;?]*|O)?\Z")
_LFLAG, _CC = 3, 6  # *Source*: the list of termios.tcgetattr
_OFF = b"\0"  # *Source*: _POSIX_VDISABLE of Linux


def has_screen() -> bool:
    """Whether a person can be shown a screen here, and can press keys."""
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return not is_dumb and sys.stdin.isatty() and sys.stdout.isatty()


class FullScreen:
    """The terminal of standard input and output, from `with` on."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)
        self._live: Live | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        ends = {signal.SIGTERM: _end, signal.SIGHUP: _end, signal.SIGWINCH: self._resized}
        self._handlers = {number: signal.signal(number, act) for number, act in ends.items()}
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, as they are now."""
        return self._console.size.width, self._console.size.height

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines, and nothing else. Longer ones are cut."""
        texts = (
            Text(line.text, style=STYLES[line.kind], no_wrap=True, overflow="ellipsis")
            for line in lines
        )
        if self._live is not None:
            self._live.update(Group(*texts), refresh=True)

    def ring(self) -> None:
        """Ring the bell."""
        self._console.bell()

    def wake(self) -> None:
        """End a wait for keys, from any thread."""
        with suppress(BlockingIOError):  # full: it is woken already
            os.write(self._wake, b"!")

    def keys(self, wait_s: float) -> list[str]:
        """Return the pressed keys, by their character or name; none if it was woken, or in time.

        Raises:
            KeyboardInterrupt: the terminal is gone.
        """
        ready, _, _ = select.select([self._input, self._woken], [], [], wait_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._input not in ready:
            return []
        text = self._read()
        while _UNFINISHED.search(text) and select.select([self._input], [], [], ESCAPE_S)[0]:
            text += self._read()
        return [KEYS.get(key, key) for key in _KEY.findall(text)]

    def edit(self, text: str) -> str:
        """Let the person change a text in the editor of the environment, and return it.

        Raises:
            ValueError: there is no editor, or it failed.
        """
        try:
            command = shlex.split(editor())
            # A directory of its own: editors leave copies beside a file.
            with tempfile.TemporaryDirectory(prefix="fumehood-") as directory:
                file = Path(directory) / "arguments.json"
                file.write_text(text, encoding="utf-8")
                with self._lent():
                    status = subprocess.run(  # noqa: S603 - the person named it
                        [*command, str(file)], check=False
                    ).returncode
                if status != 0:
                    raise ValueError(f"{command[0]} ended with {status}.")
                return file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"The editor cannot be used: {error.strerror}.") from None

    def _read(self) -> str:
        try:
            raw = os.read(self._input, 4096)
        except OSError:
            raw = b""
        if not raw:
            raise KeyboardInterrupt
        return self._decoder.decode(raw)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Give the terminal to another program, whose Ctrl-C is not ours."""
        before = signal.signal(signal.SIGINT, lambda *_: None)
        self._give_back()
        try:
            yield
        finally:
            self._take()
            signal.signal(signal.SIGINT, before)

    def _take(self) -> None:
        mode = termios.tcgetattr(self._input)
        mode[_LFLAG] &= ~(termios.ECHO | termios.ICANON)
        # Stopped or killed with a core dump by a key, the terminal would stay as it is.
        for key, value in ((termios.VSUSP, _OFF), (termios.VQUIT, _OFF), (termios.VMIN, 1)):
            mode[_CC][key] = value
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        termios.tcsetattr(self._input, termios.TCSANOW, mode)
        self._live.start()

    def _give_back(self) -> None:
        """Restore the terminal; signals wait until that is done."""
        waiting = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            if self._live is not None:
                with suppress(OSError):  # the terminal is gone
                    self._live.stop()
            with suppress(termios.error):
                termios.tcsetattr(self._input, termios.TCSANOW, self._before)
        finally:
            self._live = None
            signal.pthread_sigmask(signal.SIG_SETMASK, waiting)

    def _resized(self, number: int, frame: FrameType | None) -> None:
        self.wake()


def editor() -> str:
    """The person's editor, as the environment names it; empty without one."""
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
