"""The arguments of code: what no schema says of them, found before anything is taken.

Host side, asked by `pipeline/validate`, pure. A tool's own schema may say less than the built-in
one does, so forms are checked here, too. Invariant: arguments without a fault can be written
into a workspace by whoever writes each path below one directory.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault

MAX_FILES = 100
MAX_TOTAL_BYTES = 8 * 1024 * 1024
"""Code, standard input and files together: as much as a request over HTTP can hold."""

SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of the caller's, decoded."""

    path: str
    content: bytes


def source_name(language: str) -> str:
    """What the argument is called that holds the program."""
    return "command" if language == "shell" else "code"


def argument_faults(arguments: JsonObject, language: str = "python") -> Iterator[tuple[str, str]]:
    """Every fault as a dotted path and a clause."""
    source = source_name(language)
    code, stdin = arguments.get(source), arguments.get("stdin")
    files = arguments.get("files")
    yield from text_faults(source, code)
    if isinstance(code, str) and not code.strip():
        yield source, "is empty: there is nothing to run"
    if isinstance(code, str) and "\0" in code:
        yield source, "holds a NUL character, which no program can"
    if stdin is not None:
        yield from text_faults("stdin", stdin)
    if files is not None and not isinstance(files, list):
        yield "files", "is not a list"
        return
    faults = list(_files_faults(files or []))
    yield from faults
    if not faults and _total_bytes(code, stdin, files or []) > MAX_TOTAL_BYTES:
        yield "files", f"and {source} and stdin have more than {MAX_TOTAL_BYTES} bytes together"


def sent_files(arguments: JsonObject) -> list[SentFile]:
    """The files of arguments that have no fault."""
    return [SentFile(file["path"], _content(file)) for file in arguments.get("files") or []]


def program_arguments(arguments: JsonObject, language: str = "python") -> JsonObject:
    """The arguments as every guest takes them: each key there."""
    source = source_name(language)
    return {
        source: arguments[source],
        "stdin": arguments.get("stdin"),
        "files": arguments.get("files") or [],
    }


def text_faults(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """What keeps a value from being a text of UTF-8."""
    if not isinstance(value, str):
        yield name, "is not a text"
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        yield name, "holds a lone surrogate, which UTF-8 cannot"


def _files_faults(files: list[Any]) -> Iterator[tuple[str, str]]:
    if len(files) > MAX_FILES:
        yield "files", f"are more than {MAX_FILES}"
        return
    seen: set[str] = set()
    for index, file in enumerate(files):
        where = f"files.{index}"
        if not isinstance(file, dict) or not isinstance(file.get("path"), str):
            yield where, "is not a file with a path"
            continue
        path = file["path"]
        fault = path_fault(path)
        if fault is not None:
            yield f"{where}.path", f"({path[:SHOWN_CHARACTERS]!r}) {fault}"
        elif path in seen:
            yield f"{where}.path", f"({path[:SHOWN_CHARACTERS]!r}) is given twice"
        seen.add(path)
        yield from _content_faults(where, file)
    for index, file in enumerate(files):
        path = file.get("path") if isinstance(file, dict) else None
        if isinstance(path, str) and any(above in seen for above in _above(path)):
            shown = path[:SHOWN_CHARACTERS]
            yield f"files.{index}.path", f"({shown!r}) lies below another file"


def _above(path: str) -> Iterator[str]:
    parts = path.split("/")[:64]  # deeper ones fail where they are made
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _content_faults(where: str, file: dict[str, Any]) -> Iterator[tuple[str, str]]:
    unknown = sorted(file.keys() - {"path", "content", "content_base64"})
    if unknown:
        yield f"{where}.{str(unknown[0])[:SHOWN_CHARACTERS]}", "is not known"
    if ("content" in file) == ("content_base64" in file):
        yield where, "needs either content or content_base64"
    elif "content" in file:
        yield from text_faults(f"{where}.content", file["content"])
    elif not is_base64(file["content_base64"]):
        yield f"{where}.content_base64", "is not base64"


def is_base64(value: Any) -> bool:
    """Whether a value is a text of strict base64."""
    try:
        return isinstance(value, str) and decoded(value) is not None
    except ValueError:
        return False


def decoded(value: str) -> bytes:
    """The bytes of a base64 text. Raises ValueError."""
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("not base64") from None


def _content(file: JsonObject) -> bytes:
    text: str | None = file.get("content")
    return text.encode() if text is not None else decoded(file["content_base64"])


def _total_bytes(code: Any, stdin: Any, files: list[Any]) -> int:
    texts = [text for text in (code, stdin) if isinstance(text, str)]
    texts += [file.get("content", file.get("content_base64", "")) for file in files]
    # Surrogates have been refused by now, or are about to be.
    return sum(len(text.encode("utf-8", "replace")) for text in texts)
