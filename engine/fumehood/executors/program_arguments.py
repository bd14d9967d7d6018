"""Checks of arguments that a tool's schema cannot make, by executor.

Host side, pure, used by `pipeline/validate`. A tool's own schema may be weaker than the built-in
one, so these rules apply to every tool whose arguments reach a container; the guest checks paths
once more. Invariant: arguments without a fault name nothing outside the workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault
from fumehood.executors.code_arguments import (
    SHOWN_CHARACTERS,
    argument_faults,
    is_base64,
    text_faults,
)
from fumehood.executors.workspace_claims import MAX_READ_BYTES, MAX_WRITE_BYTES

MODES = ("create", "replace", "append")
ENCODINGS = ("text", "base64")
MAX_LIMIT = 100
"""Entries of one page (mission E5)."""

MAX_PATHS = 100


def program_faults(executor: str, arguments: JsonObject) -> Iterator[tuple[str, str]]:
    """Every fault as a dotted path and a clause; none for executors without such rules."""
    kind, _, what = executor.partition(":")
    if kind == "code":
        yield from argument_faults(arguments, what)
    elif kind == "workspace":
        yield from workspace_faults(arguments, what)


def workspace_faults(arguments: JsonObject, action: str) -> Iterator[tuple[str, str]]:
    """Every fault as a dotted path and a clause. `action` is read, write, list or delete."""
    match action:
        case "read":
            yield from _path_faults("path", arguments.get("path"))
            yield from _number_faults(arguments, "offset", 0, 1 << 50)
            yield from _number_faults(arguments, "limit", 1, MAX_READ_BYTES)
            yield from _choice_faults(arguments, "encoding", ENCODINGS)
        case "write":
            yield from _path_faults("path", arguments.get("path"))
            yield from _choice_faults(arguments, "mode", MODES)
            yield from _content_faults(arguments)
        case "list":
            if arguments.get("path") not in (None, ""):  # the workspace itself
                yield from _path_faults("path", arguments["path"])
            yield from _number_faults(arguments, "limit", 1, MAX_LIMIT)
            yield from _switch_faults(arguments)
            if not isinstance(arguments.get("cursor"), str | None):
                yield "cursor", "is not a text"
        case _:
            yield from _paths_faults(arguments.get("paths"))
            yield from _switch_faults(arguments)


def _path_faults(name: str, path: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(path, str):
        yield name, "is not a text"
        return
    fault = path_fault(path)
    if fault is not None:
        yield name, f"({path[:SHOWN_CHARACTERS]!r}) {fault}"


def _paths_faults(paths: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(paths, list) or not paths:
        yield "paths", "is not a list of paths"
        return
    if len(paths) > MAX_PATHS:
        yield "paths", f"are more than {MAX_PATHS}"
        return
    for index, path in enumerate(paths):
        yield from _path_faults(f"paths.{index}", path)


def _content_faults(arguments: JsonObject) -> Iterator[tuple[str, str]]:
    text, encoded = arguments.get("content"), arguments.get("content_base64")
    size = 0
    if (text is None) == (encoded is None):
        yield "content", "or content_base64 is needed, one of the two"
        return
    if text is not None:
        faults = list(text_faults("content", text))
        yield from faults
        size = 0 if faults else len(text.encode())
    elif isinstance(encoded, str) and is_base64(encoded):
        size = len(encoded) * 3 // 4
    else:
        yield "content_base64", "is not base64"
    if size > MAX_WRITE_BYTES:
        yield "content", f"has more than {MAX_WRITE_BYTES} bytes"


def _number_faults(
    arguments: JsonObject, name: str, least: int, most: int
) -> Iterator[tuple[str, str]]:
    value = arguments.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        yield name, f"is not a whole number from {least} to {most}"


def _choice_faults(
    arguments: JsonObject, name: str, known: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    if arguments.get(name) not in (None, *known):
        yield name, f"is none of {', '.join(known)}"


def _switch_faults(arguments: JsonObject) -> Iterator[tuple[str, str]]:
    if not isinstance(arguments.get("recursive"), bool | None):
        yield "recursive", "is neither true nor false"
