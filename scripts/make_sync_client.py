"""Generate the synchronous client from the asynchronous one.

Usage: `python scripts/make_sync_client.py` rewrites engine/fumehood/client/sync from the modules
`async_….py` beside it. A test fails while they are out of date.

It replaces tokens, as the package `unasync` does. That package does not fit here: it leaves
docstrings as they are, so those of `Client` would speak of `AsyncClient`; it makes `SyncClient` of
`AsyncClient`; it only writes files, so a test could not compare; and it imports setuptools.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "engine" / "fumehood" / "client"
SYNC = CLIENT / "sync"

NAMES = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "aiter_bytes": "iter_bytes",
    "aiter_raw": "iter_raw",
    "anyio": "time",  # which sleeps
    "ask_model_async": "ask_model",
    "aread": "read",
    "enter_async_context": "enter_context",
    "chunks_of_async": "chunks_of",
    "note_async": "note",
}
"""Asynchronous name → synchronous name. `AsyncX` becomes `X`, and module `async_x` `sync.x`."""

PHRASES = {
    "An asynchronous context manager, for one event loop.": (
        "A context manager; threads may share it."
    ),
    "Sends and waits. May be used by one event loop.": (
        "Sends and waits. May be used by several threads."
    ),
    " Cancelling the task that waits ends the waiting; it does not stop the call, whose\n"
    "        own limits do.": "",
}
"""What docstrings of the asynchronous client say of it alone → what the others say instead."""

CLEAN = ("check", "--quiet", "--select=I,UP028", "--fix", "--unsafe-fixes")
"""Sorts the imports, and writes `yield from` for a loop that only yields."""

FORMAT = ("format", "--quiet")


def main() -> None:
    """Write the generated modules."""
    for path, source in generate().items():
        path.write_text(source, encoding="utf-8")


def generate() -> Mapping[Path, str]:
    """Every generated module: its path and its text.

    Raises:
        ValueError: a phrase stands in no docstring, so it cannot be replaced.
    """
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(CLIENT.glob("async_*.py"))}
    for phrase in PHRASES:
        if not any(phrase in source for source in sources.values()):
            raise ValueError(f"No docstring says: {phrase!r}")
    return {
        (target := SYNC / path.name.removeprefix("async_")): _formatted(
            _head(path) + synchronous(source), target
        )
        for path, source in sources.items()
    }


def synchronous(source: str) -> str:
    """The source without `async` and `await`, its names and docstrings replaced."""
    line_starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
    made, copied = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (line_starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            made += source[copied:start]
            copied = end + 1  # with the space behind it
        elif token.type in (tokenize.NAME, tokenize.STRING):
            replace = _replace_name if token.type == tokenize.NAME else _replace_text
            made += source[copied:start] + replace(token.string)
            copied = end
    return made + source[copied:]


def _replace_name(name: str) -> str:
    if name.startswith("async_"):
        return f"sync.{name.removeprefix('async_')}"
    return NAMES.get(name) or re.sub(r"^Async(?=[A-Z])", "", name)


def _replace_text(text: str) -> str:
    for phrase, replacement in PHRASES.items():
        text = text.replace(phrase, replacement)
    return re.sub(r"\bAsync(?=[A-Z])", "", text)


def _head(path: Path) -> str:
    return f"# Made by scripts/make_sync_client.py from client/{path.name}. Do not edit it here.\n"


def _formatted(source: str, path: Path) -> str:
    for command in (CLEAN, FORMAT):
        ruff = [sys.executable, "-P", "-m", "ruff", *command, "--stdin-filename", path, "-"]
        done = subprocess.run(  # noqa: S603 - fixed arguments
            ruff, input=source, capture_output=True, check=True, text=True
        )
        source = done.stdout
    return source


if __name__ == "__main__":
    main()
