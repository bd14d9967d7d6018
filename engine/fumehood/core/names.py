"""Names: the pattern of a tool's name, patterns with `*`, and checks and suggestions for names.

This module imports almost nothing, so that commands start quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

NAME_PATTERN = r"^[a-zA-Z_][a-zA-Z0-9_-]{0,63}$"
TOOL_REFERENCE_PATTERN = NAME_PATTERN[:-1] + r"(@[0-9A-Za-z.+-]{1,100})?$"
"""Pattern of a reference to a tool: `name` or `name@version`."""

IMAGE_NAME = r"^[a-z][a-z0-9-]{0,30}$"

EXTERNAL = "external:"
"""Prefix of the names of external tools. Registered tools cannot have it."""

NET_TOOL = "net"
"""The tool name that policy and approvals see for programs' network requests. No other tool can
have it."""

EXTERNAL_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$"
"""Pattern of an external tool's name after the prefix. *Source*: the names that MCP allows."""

MAX_COMPARED = 1000
"""Maximum number of known names that are compared with a misspelt one. Each comparison takes tens
of microseconds."""

MAX_NAMED = 8
"""Maximum number of names that a message lists."""

MAX_NAME_CHARACTERS = 80
"""Maximum characters of a name that a message shows, or that are compared with known names."""


def listed(names: Sequence[str]) -> str:
    """Return the names, separated by commas. After the first `MAX_NAMED` names, only the number of
    the remaining names is given.
    """
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the known names most similar to `given`, or an empty text if
    none is similar. The sentence begins with a space.
    """
    near = nearest(given, known)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the known name most similar to `given`, such as `;
    did you mean 'x'?`.

    Return an empty text if no name is similar.
    """
    near = nearest(given, sorted(known), most=1)
    return f"; did you mean {near[0]!a}?" if near else ""


def checked_keywords(kind: type, method: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Check the names of the keyword arguments that a method was called with, and return the
    arguments.

    `kind` is the `TypedDict` of the allowed names, and `method` names the method in the message.
    The values are not checked here: the engine checks them as it does for requests over a socket.

    Raises:
        TypeError: a name is not a key of `kind`.
    """
    known: dict[str, object] = kind.__annotations__
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return dict(given)
    cure = did_you_mean(unknown, known) or f" It takes {', '.join(sorted(known))}."
    raise TypeError(f"{method}() has no keyword argument {unknown!r}.{cure}")


def nearest(given: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names that are similar to a misspelt name, at most `most` of them, most
    similar first.
    """
    from difflib import get_close_matches

    return get_close_matches(given[:MAX_NAME_CHARACTERS], islice(known, MAX_COMPARED), n=most)


def named_apart(name: str, original: str, longest: int) -> str:
    """Return `name`, and add a hash if `name` might not be unique.

    `original` is the text from which `name` was made, and from which the hash is computed. The hash
    is added if `name` is longer than `longest` characters, or if `original` has letters outside
    ASCII. A result with a hash has at most `longest` characters.
    """
    # Originals that differ only in letters outside ASCII may have the same name.
    has_lost = any(letter.isalnum() and not letter.isascii() for letter in original)
    if len(name) <= longest and not has_lost:
        return name
    import hashlib  # few names need it

    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[: longest - 9]}_{digest}"


def compile_glob(pattern: str) -> Callable[[str], bool]:
    """Compile a pattern to a function that tests whether a whole text matches.

    `*` matches any text, even an empty one. The test takes linear time.
    """
    first, *others = pattern.split("*")
    if not others:
        return lambda text: text == pattern
    *middle, last = others
    shortest = len(pattern) - pattern.count("*")

    def fits(text: str) -> bool:
        if len(text) < shortest or not text.startswith(first) or not text.endswith(last):
            return False
        position, end = len(first), len(text) - len(last)
        for part in middle:
            found = text.find(part, position, end)
            if found < 0:
                return False
            position = found + len(part)
        return True

    return fits


def any_matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of these patterns matches a name."""
    return any(compile_glob(pattern)(name) for pattern in patterns)
