"""Text in pages: the output of templates is escaped, for HTML and for readers.

Invariant: the environment made here escapes every printed value twice: invisible characters, and
those that change the direction of text, become codes such as `\\u{202e}`, and HTML's special
characters are quoted. Only markup made in this package (`Markup`) is not escaped, and it never
contains untrusted text. The filter `exact` escapes for HTML only, for values that a form sends
back.
"""

from __future__ import annotations

import hashlib
import json
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fumehood.approvals.wording import (
    OUTSIDE,
    argument_name,
    context_in,
    effect_heading,
    ending_in_words,
    entries_of,
    entry_facts,
    hidden_in,
    is_outside,
    is_shown,
    preview_in_words,
    rest_of,
)
from fumehood.approvals.wording import ago as words_of_age
from fumehood.core.escaping import json_line, printable, visible
from fumehood.core.long_text import cut
from fumehood.web.changes import changes_in
from fumehood.web.code import coloured, language_of
from fumehood.web.figures import FILTERS

HERE = Path(__file__).parent
STATIC = HERE / "static"

MAX_SHOWN = 20_000
"""Maximum characters of one text on a page. The whole text can be downloaded."""

SEEN_LINES, SEEN_CHARACTERS = 12, 600
"""Size of a text that a box shows without scrolling, even on a phone: `.code` in `app.css`."""

_DIFF_KINDS = {"+": "added", "-": "removed", "@": "hunk"}
"""First character of a line in a diff → its CSS class."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The beginning of a text that may be too long for a page."""

    text: str
    is_cut: bool
    length: int | None
    """Number of characters of the whole text. None for other values, of which only the beginning is
    encoded."""

    is_scrolled: bool
    """Whether its end may need scrolling."""


@cache
def make_environment() -> Environment:
    """Return the environment of all templates. Cached, because compiling them takes a while."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals.update(static=_static_addresses().__getitem__)
    environment.filters.update(
        age=age,
        moment=moment,
        person=person,
        amount=amount,
        brief=brief,
        exact=Markup.escape,
        shown=shown,
        json_line=json_line,
        diff=diff_lines,
        effect_heading=effect_heading,
        ending=ending_in_words,
        preview_words=preview_in_words,
        changes=changes_in,
        entries=entries_of,
        facts=lambda entry: ", ".join(entry_facts(entry)) or "entry",
        rest_of=rest_of,
        argument_name=argument_name,
        context=context_in,
        visible=visible,
        unknown_of=lambda preview: {k: v for k, v in preview.items() if not is_shown(k, v)},
        hidden=hidden_in,
        coloured=coloured,
        language_of=language_of,
        outside=lambda approval: f"{OUTSIDE}." if is_outside(approval) else "",
    )
    environment.filters.update(FILTERS)
    return environment


def age(then: datetime | None, now: datetime | None = None) -> Markup:
    """Format the time since `then`, such as `2 m ago`. The page keeps it up to date."""
    if then is None:
        return Markup("")
    words = words_of_age(then, now or datetime.now(UTC))
    at = then.astimezone(UTC)
    return Markup('<time datetime="{}" title="{:%Y-%m-%d %H:%M:%S} UTC" data-age>{}</time>').format(
        at.isoformat(), at, words
    )


@cache
def person(principal_id: str) -> str:
    """Return a principal with the name of its user on this machine, such as `ann (uid:1000)`."""
    kind, _, number = principal_id.partition(":")
    if kind != "uid" or not number.isdigit():
        return principal_id
    try:
        return f"{pwd.getpwuid(int(number)).pw_name} ({principal_id})"
    except (KeyError, OverflowError):
        return principal_id


def moment(then: datetime | None) -> Markup:
    """Format a time of day in UTC, with the date unless it is today."""
    if then is None:
        return Markup("")
    at, now = then.astimezone(UTC), datetime.now(UTC)
    form = "%H:%M:%S" if at.date() == now.date() else "%Y-%m-%d %H:%M"
    return Markup('<time datetime="{}" title="{:%Y-%m-%d %H:%M:%S} UTC">{}</time>').format(
        at.isoformat(), at, at.strftime(form)
    )


def amount(number: float) -> str:
    """Format a number with thousands separators."""
    return f"{number:,}"


def brief(value: Any, length: int = 120) -> str:
    """Return the beginning of a text or a JSON value on one line, with a mark if it is cut."""
    text = value if isinstance(value, str) else _arguments_in_brief(value, length)
    return cut(text[: length + 1].replace("\n", " ⏎ ").replace("\t", " "), length)


def shown(value: Any) -> Shown:
    """Return as much of a text, or of a value as JSON, as fits on a page."""
    is_text = isinstance(value, str)
    text = value[: MAX_SHOWN + 1] if is_text else _json(value, MAX_SHOWN + 1, indent=2)
    head = text[:MAX_SHOWN]
    return Shown(
        head,
        is_cut=len(head) < len(text),
        length=len(value) if is_text else None,
        is_scrolled=head.count("\n") >= SEEN_LINES or len(head) > SEEN_CHARACTERS,
    )


def diff_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line of a diff with its CSS class."""
    for line in text.removesuffix("\n").split("\n"):
        yield _DIFF_KINDS.get(line[:1], "same"), line


def _arguments_in_brief(value: Any, length: int) -> str:
    """Format a call's arguments as `name: value, …`, up to the given length."""
    if not isinstance(value, dict):
        return _json(value, length + 1)
    parts, used = [], 0
    for name, one in value.items():
        text = one[: length + 1] if isinstance(one, str) else _json(one, length + 1)
        parts.append(f"{cut(name, 40)}: {text}" if len(value) > 1 else text)
        used += len(parts[-1])
        if used > length:
            break
    return " · ".join(parts)


def _json(value: Any, length: int, indent: int | None = None) -> str:
    """Encode the beginning of a value as JSON. The whole value may have megabytes."""
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent)
    pieces = islice(encoder.iterencode(value), length)
    return "".join(pieces)[:length]


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return "" if value is None else printable(str(value))


def _static_addresses() -> dict[str, str]:
    """Return the address of each static file, which changes with its content."""
    return {
        path.name: f"/static/{path.name}?{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        for path in STATIC.iterdir()
    }
