"""What `fumehood run` sends: a program, its input, and files, read from here."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable
from pathlib import Path

from fumehood.cli.exits import ExitCode, fail
from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault

MAX_BYTES = 8 * 1024 * 1024


def read_text(name: str, what: str) -> str:
    """A text of UTF-8 from a file, or from standard input (`-`)."""
    raw = _read(name, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"{what} is not UTF-8 at byte {error.start}.", ExitCode.USAGE)


def files_to_send(given: Iterable[str]) -> list[JsonObject]:
    """Files as arguments: each under its own name, or as NAME=PATH says."""
    files: list[JsonObject] = []
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).name, text
        fault = path_fault(name)
        if fault is not None:
            fail(f"--file {text[:80]!r}: the name in the sandbox {fault}.", ExitCode.USAGE)
        raw = _read(path, f"--file {text[:80]!r}")
        try:
            content = {"content": raw.decode("utf-8")}
        except UnicodeDecodeError:
            content = {"content_base64": base64.b64encode(raw).decode("ascii")}
        files.append({"path": name, **content})
    return files


def _read(name: str, what: str) -> bytes:
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        fail(f"{what} cannot be read: {error.strerror}.", ExitCode.USAGE)
    if len(raw) > MAX_BYTES:
        fail(f"{what} is over 8 MB.", ExitCode.USAGE)
    return raw
