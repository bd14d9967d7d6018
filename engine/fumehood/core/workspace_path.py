"""Paths inside a workspace: relative, made of plain names, with one rule for all sources.

Values only. Paths from callers, from guests, and of files that the command line writes are checked
by the same rule. Invariant: a path without a fault, joined to a directory,
names something below it, as long as no link is followed on the way.
"""

from __future__ import annotations

MAX_PATH_BYTES = 4096 - len("/workspace/") - 1
"""*Source*: PATH_MAX of limits.h counts the whole path and its ending NUL."""

MAX_ANY_PATH_BYTES = 4095
"""PATH_MAX without the ending NUL, for a path that is not below the workspace."""

MAX_NAME_BYTES = 255
"""*Source*: NAME_MAX of limits.h."""


WORKSPACE = "/workspace"
"""The path of the workspace for programs."""

RESERVED_PREFIX = ".fumehood-upload-"
"""Name prefix of an unfinished upload."""


def path_fault(path: str) -> str | None:
    """The fault of a path as a clause ("is absolute"), or None."""
    if not path:
        return "is empty"
    if "\0" in path:
        return "holds a NUL character"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "holds a lone surrogate"
    if len(encoded) > MAX_PATH_BYTES:
        return f"has more than {MAX_PATH_BYTES} bytes"
    if path.startswith("/"):
        return "is absolute; paths are relative to the workspace"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "has a part that is empty, '.' or '..'"
    if any(part.startswith(RESERVED_PREFIX) for part in parts):
        return f"has a part that begins with {RESERVED_PREFIX}, which is reserved"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {MAX_NAME_BYTES} bytes"
    return None


def absolute_path(path: str) -> tuple[str, ...] | None:
    """The parts of a path relative to the workspace, or None if the text is no valid path.

    `.`, `..` and doubled slashes are resolved in the text. Links are not followed.
    """
    if not path or "\0" in path or len(path) > MAX_ANY_PATH_BYTES:
        return None
    try:
        if len(path.encode()) > MAX_ANY_PATH_BYTES:
            return None
    except UnicodeEncodeError:
        return None
    given = (path if path.startswith("/") else f"{WORKSPACE}/{path}").split("/")[1:]
    if _TO_RESOLVE.isdisjoint(given):
        return tuple(given)
    parts: list[str] = []
    for part in given:
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return tuple(parts)


_TO_RESOLVE = frozenset({"", ".", ".."})
