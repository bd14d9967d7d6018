"""Shared options, parsing of times and files, and commands that do not load pydantic.

typer loads pydantic and builds a validator for each parameter, even for plain text. This takes
several times as long as a call. A `PlainCommand` therefore converts plain values (str, int, float,
Path) itself, and leaves other values and all errors to typer.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fumehood.cli.exits import ExitCode, fail
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import cut
from fumehood.core.pages import MAX_ITEMS, MAX_PAGE
from fumehood.protocol import strict_json


def directory(given: str | None) -> Path | None:
    """Return the path given with an option, or None if the option is missing. End the command if
    the path is empty.
    """
    if given == "":
        fail("Name a directory; . is this one.", ExitCode.USAGE)
    return None if given is None else Path(given)


AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
CredentialStdin = Annotated[
    bool,
    typer.Option("--credential-stdin", help="Read the credential from a line of standard input."),
]
SocketPath = Annotated[
    Path | None,
    typer.Option("--socket", help="The engine's socket; default: by configuration."),
]
ControlSocketPath = Annotated[
    Path | None,
    typer.Option(
        "--socket", help="The control socket; default: by configuration, beside the callers' one."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="Call with the token in this file, which only you can read. Default: the variable "
        "FUMEHOOD_TOKEN, if it is set.",
    ),
]
Packages = Annotated[
    list[str] | None,
    typer.Option(
        "--package",
        metavar="NAME",
        help="Add a package of the Python index, such as 'humanize>=4'. Repeatable.",
    ),
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        metavar="HOST",
        help="A host that programs may reach, if the operator allows it. Repeatable.",
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An environment variable of programs. Repeatable."),
]
ToolName = Annotated[str, typer.Argument(help="name or name@version")]
CallId = Annotated[str, typer.Argument(help="The call's id, call_….")]
OfAgent = Annotated[str | None, typer.Option("--agent", help="Calls made as this agent.")]
OfTool = Annotated[
    str | None, typer.Option("--tool", help="Calls of this tool: name or name@version.")
]
Limit = Annotated[int, typer.Option(min=1, max=MAX_ITEMS, help="Maximum number to list.")]
Until = Annotated[str | None, typer.Option("--until", help="Before this age or time.")]

MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Maximum size of one local file in bytes. The engine itself refuses requests that are too
large."""

SPAN = re.compile(r"^(\d{1,6})([smhd])$")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@contextmanager
def local(what: object, words: str = "cannot be used") -> Iterator[None]:
    """End the command with a message if the block raises OSError. `what` is the file or directory.
    The message consists of `what`, `words` and the system's reason.
    """
    try:
        yield
    except OSError as error:
        fail(f"{what} {words}: {error.strerror}.", ExitCode.USAGE)


def read_bytes(name: str, what: str, most: int = MAX_INPUT_BYTES) -> bytes:
    """Read a file, or standard input if `name` is `-`. End the command if that fails or the content
    has more than `most` bytes. `what` names the file in messages.
    """
    with local(what, "cannot be read"):
        if name == "-":
            raw = sys.stdin.buffer.read(most + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(most + 1)
    if len(raw) > most:
        fail(f"{what} is over {most >> 20} MB.", ExitCode.USAGE)
    return raw


def read_text(name: str, what: str) -> str:
    """Read UTF-8 text from a file, or from standard input if `name` is `-`. End the command if that
    fails. `what` names the file in messages.
    """
    raw = read_bytes(name, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"{what} is not UTF-8 at byte {error.start}.", ExitCode.USAGE)


def json_object(raw: bytes | str, what: str, hint: str = "") -> JsonObject:
    """Parse a JSON object. `what` names the object in messages.

    If `raw` is not a JSON object, end the command with a message, to which `hint` is appended.
    """
    try:
        value = strict_json.loads(
            raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogateescape")
        )
    except strict_json.StrictJsonError as error:
        fail(f"{what} cannot be read: {error}.{hint}", ExitCode.USAGE)
    if not isinstance(value, dict):
        fail(f"{what} must be a JSON object.{hint}", ExitCode.USAGE)
    return value


def age(then: datetime, now: datetime) -> str:
    """Format the time from `then` to `now` in its largest unit, such as `3h`. `moment` can parse
    the result.
    """
    seconds = max(0, int((now - then).total_seconds()))
    unit = next((unit for unit in "dhm" if seconds >= UNITS_S[unit]), "s")
    return f"{seconds // UNITS_S[unit]}{unit}"


def one_line(value: str, columns: int) -> str:
    """Return untrusted text escaped and cut to `columns`, for one cell of a table."""
    return cut(visible(value), columns)


def pages(fetch: Callable[..., Any]) -> Iterator[Any]:
    """Yield all pages of a list. `fetch` is called with the keyword argument `cursor`, which is
    None for the first page, and must return the page that begins there.
    """
    cursor = None
    while True:
        page = fetch(cursor=cursor)
        yield page
        cursor = getattr(page, "pagination", page).next_cursor
        if cursor is None:
            return


def newest(
    fetch: Callable[..., Any], limit: int, known: str | None = None
) -> tuple[list[Any], bool]:
    """Return the newest calls of a list, at most `limit`. Also return whether the list has more
    calls.

    `fetch` returns pages of calls, newest first. If `known` is given, only calls that are newer
    than the call with this id count.
    """
    found: list[Any] = []
    for page in pages(partial(fetch, limit=min(MAX_PAGE, limit))):
        for item in page.items:
            if known is not None and item.call_id == known:
                return found, False
            found.append(item)
        if len(found) >= limit:
            return found[:limit], page.has_more or len(found) > limit
    return found, False


def require_seconds(given: float | None, option: str) -> None:
    """End the command with a usage error unless `given`, the value of `option`, is None or a
    positive, finite number.
    """
    if given is not None and not 0 < given < float("inf"):
        fail(f"{option} takes a number of seconds over 0.", ExitCode.USAGE)


def counted(count: int, noun: str) -> str:
    """Format a number with its noun, such as `1 rule` or `2 rules`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def moment(text: str | None, now: datetime, option: str = "--since") -> datetime | None:
    """Parse a time, or an age such as `3h`, which is subtracted from `now`. A time without a zone
    is local time.

    Return None if `text` is None. `option` names the option in the message. End the command if the
    text is neither an age nor a time.
    """
    found = None if text is None else _parse(text, now, -1)
    if found is None and text is not None:
        fail(
            f"{option} {text[:80]!r} is neither an age (30s, 10m, 1h, 7d) nor a time "
            "(2026-01-31T09:30).",
            ExitCode.USAGE,
        )
    return found


def pairs_of(words: list[str]) -> dict[str, str]:
    """Parse words of the form NAME=VALUE, and return a dictionary from each NAME to its VALUE. End
    the command if a word has another form.
    """
    for word in words:
        if "=" not in word:
            fail(f"{word!r} is no NAME=VALUE.", ExitCode.USAGE)
    return dict(word.split("=", 1) for word in words)


def deadline(text: str, now: datetime, option: str) -> datetime:
    """Parse a time, or a duration such as `3h`, which is added to `now`. A time without a zone is
    local time.

    End the command if the text is neither a duration nor a time. `option` names the option in the
    message.
    """
    found = _parse(text, now, 1)
    if found is None:
        fail(
            f"{option} takes a duration (30m, 2h, 1d) or a time (2026-01-31T09:30).",
            ExitCode.USAGE,
        )
    return found


def _parse(text: str, now: datetime, direction: int) -> datetime | None:
    span = SPAN.match(text)
    try:
        if span is not None:
            return now + direction * timedelta(seconds=int(span[1]) * UNITS_S[span[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


class _PlainParameters:
    """Mixin for commands and groups whose parameters convert simple values (text, numbers and
    paths) without pydantic, so that the command starts faster.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the command's parameters, including `--help`. Each of them now converts simple
        values without pydantic.
        """
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "_runtime_param", parameter) is None:  # typer makes it on demand
                parameter._runtime_param = _PlainValue()
        return parameters


class PlainCommand(_PlainParameters, TyperCommand):
    """A command that does not load pydantic to convert simple values (text, numbers and paths)."""


class PlainGroup(_PlainParameters, TyperGroup):
    """A group of commands that does not load pydantic to convert simple values of its options."""


class _PlainValue:
    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text, a number or a path without pydantic. Leave any other value, and any
        invalid value, to typer.
        """
        is_many = param.multiple or param.nargs == -1
        if value is None:
            return () if is_many else None
        wanted = param.type_descriptor
        if isinstance(value, str) and not is_many and not wanted.is_ranged:
            if wanted.annotation in (str, int, float):
                with suppress(ValueError):
                    return wanted.annotation(value)
            if wanted.annotation is Path and _is_plain(value):
                return Path(value)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param, ctx)


def _is_plain(path: str) -> bool:
    """Return True if a path does not exist or is readable. Any other path must be checked by typer,
    which refuses paths that exist but are not readable.
    """
    return not os.path.lexists(path) or os.access(path, os.R_OK)
