"""Paths inside a workspace: relative, and made of plain names.

Values only. The same rule applies to paths from callers, from guests, and of files that the command
line writes. Invariant: a path without a fault, joined to a directory, names something below that
directory, as long as no link is followed.
"""

from __future__ import annotations

MAX_PATH_BYTES = 4096 - len("/workspace/") - 1
"""Maximum bytes of a path relative to the workspace. *Source*: PATH_MAX of limits.h, which counts
the whole path and its ending NUL."""

MAX_NAME_BYTES = 255
"""Maximum bytes of one name in a path. *Source*: NAME_MAX of limits.h."""


WORKSPACE = "/workspace"
"""Absolute path of the workspace inside the sandbox."""

RESERVED_PREFIX = ".fumehood-upload-"
"""Name prefix of an unfinished upload."""


def path_fault(path: str) -> str | None:
    """Return the fault of a path as a clause ("is absolute"), or None if the path is valid."""
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
    """Return the parts of `path` as an absolute path, or None if `path` is not a valid path. A
    relative `path` is a path in the workspace, so its result begins with `workspace`.

    `.`, `..` and double slashes are resolved in the text alone, and links are not followed.
    """
    if not path or "\0" in path or len(path) > MAX_PATH_BYTES:
        return None
    try:
        if len(path.encode()) > MAX_PATH_BYTES:
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
