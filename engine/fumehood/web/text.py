"""Text in pages: values that templates print are escaped, both for HTML and for human readers.

Invariant: the environment made here escapes every printed value twice: invisible characters, and
those that change the direction of text, become codes such as `\\u{202e}`, and HTML's special
characters are quoted. Only markup that this package makes (`Markup`) is not escaped. It never
contains untrusted text that is not escaped. The filter `exact` escapes for HTML only, for values
that a form sends back. Pygments splits programs into pieces for colouring. Each piece is escaped,
and the spans around the pieces only have classes from this module. In a tree of files, the names
from the root to a file, joined with slashes, are the file's path.
"""

from __future__ import annotations

import hashlib
import json
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType

from fumehood.client.wording import (
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
    sends_heading,
    sends_in_words,
)
from fumehood.client.wording import ago as words_of_age
from fumehood.core.escaping import json_line, printable, visible
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.long_text import cut
from fumehood.web.figures import FILTERS

HERE = Path(__file__).parent
STATIC = HERE / "static"

MAX_SHOWN = 20_000
"""Maximum number of characters of one text on a page. Users can download the whole text."""

SEEN_LINES, SEEN_CHARACTERS = 12, 600
"""Maximum lines and characters of a text that a box shows without scrolling, even on a phone:
`.code` in `app.css`."""

_DIFF_KINDS = {"+": "added", "-": "removed", "@": "hunk"}
"""Maps the first character of a line in a diff to the line's CSS class."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The text that a page shows for a value: the whole text or, if that is too long, its
    beginning.
    """

    text: str
    is_cut: bool
    length: int | None
    """Number of characters of the whole text. None if the value is not a text: only the beginning
    of such a value is encoded, so the length is unknown."""

    is_scrolled: bool
    """Whether a reader may have to scroll to see the end of the text."""


@cache
def make_environment() -> Environment:
    """Return the Jinja environment of all templates. It is created at the first call only."""
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
        sends_heading=sends_heading,
        sends_words=sends_in_words,
        outside=lambda approval: f"{OUTSIDE}." if is_outside(approval) else "",
    )
    environment.filters.update(FILTERS)
    return environment


def age(then: datetime | None, now: datetime | None = None) -> Markup:
    """Format the time since `then`, such as `2 m ago`. A script on the page keeps the text up to
    date.
    """
    if then is None:
        return Markup("")
    words = words_of_age(then, now or datetime.now(UTC))
    at = then.astimezone(UTC)
    return Markup('<time datetime="{}" title="{:%Y-%m-%d %H:%M:%S} UTC" data-age>{}</time>').format(
        at.isoformat(), at, words
    )


@cache
def person(principal_id: str) -> str:
    """Return a principal's id. If the id belongs to a user of this machine, add the user's name, as
    in `ann (uid:1000)`.
    """
    kind, _, number = principal_id.partition(":")
    if kind != "uid" or not number.isdigit():
        return principal_id
    try:
        return f"{pwd.getpwuid(int(number)).pw_name} ({principal_id})"
    except (KeyError, OverflowError):
        return principal_id


def amount(number: float) -> str:
    """Format a number with thousands separators."""
    return f"{number:,}"


def brief(value: Any, length: int = 120) -> str:
    """Return the beginning of a text or of a JSON value on one line.

    If the value is longer than `length` characters, the result ends with a sign that shows this.
    """
    text = value if isinstance(value, str) else _arguments_in_brief(value, length)
    return cut(text[: length + 1].replace("\n", " ⏎ ").replace("\t", " "), length)


def shown(value: Any) -> Shown:
    """Return the text that a page shows for `value`. A value that is not a text is converted to
    JSON. Text beyond `MAX_SHOWN` characters is cut off.
    """
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
    """Yield the CSS class and the text of each line of a diff."""
    for line in text.removesuffix("\n").split("\n"):
        yield _DIFF_KINDS.get(line[:1], "same"), line


def _arguments_in_brief(value: Any, length: int) -> str:
    """Format a call's arguments on one line, such as `name: value · name: value`, up to about
    `length` characters.
    """
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
    """Return the first `length` characters of a value as JSON. Only this beginning is encoded."""
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent)
    # The whole value may have megabytes.
    pieces = islice(encoder.iterencode(value), length)
    return "".join(pieces)[:length]


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return "" if value is None else printable(str(value))


def _static_addresses() -> dict[str, str]:
    """Return a dictionary from the name of each static file to its address, which changes whenever
    the file's content changes.
    """
    return {
        path.name: f"/static/{path.name}?{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        for path in STATIC.iterdir()
    }


# -- changed files ----------------------------------------------------------------------------

KINDS = {"added": "+", "changed": "~", "removed": "−"}
"""Maps a kind of change to the sign that the page shows for it."""

MAX_SHOWN_OF_KIND = 200
"""Maximum number of files of one kind of change on a page. The downloaded preview contains all
files."""

MAX_OPEN = 20
"""Number of files on a page whose details are unfolded at first."""

MAX_DEPTH = 8
"""Maximum depth of a tree of files. The names of deeper directories become part of the file's
name."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One changed file in the preview of an approval."""

    number: int
    """The file's position on the page, counted from 1."""
    kind: str
    path: str
    entry: JsonObject
    lines: tuple[int, int] | None
    """Numbers of lines that the diff adds and removes, or None if the file has no diff."""

    @property
    def sign(self) -> str:
        """The sign for the kind of change, such as `+` for an added file."""
        return KINDS[self.kind]

    @property
    def has_body(self) -> bool:
        """Whether the page shows details below the file's name, which the reader can fold and
        unfold.
        """
        entry = self.entry
        return self.lines is not None or "target" in entry or bool(rest_of(entry))

    @property
    def is_open(self) -> bool:
        """Whether the details below the file's name are unfolded at first."""
        return self.number <= MAX_OPEN


@dataclass(frozen=True, slots=True)
class Changes:
    """The changed files of a preview, as a page shows them."""

    files: tuple[FileChange, ...]
    left_out: tuple[tuple[str, Sequence[str]], ...]
    """Each kind of change of which the page does not show all files, with the paths of the files
    that are not shown."""

    @property
    def folded(self) -> int:
        """Number of files whose details are folded at first."""
        return sum(one.has_body and not one.is_open for one in self.files)

    @property
    def tree(self) -> Sequence[Branch]:
        """The shown files as a tree of directories."""
        return tree_of((one.path, one) for one in self.files)


def changes_in(preview: JsonObject) -> Changes:
    """Return the changed files of a preview: first the added, then the changed, then the removed
    files.
    """
    files: list[FileChange] = []
    left_out: list[tuple[str, Sequence[str]]] = []
    for kind in KINDS:
        entries = entries_of(preview, kind)
        for entry in entries[:MAX_SHOWN_OF_KIND]:
            path, lines = str(entry["path"]), _lines(entry.get("diff"))
            files.append(FileChange(len(files) + 1, kind, path, entry, lines))
        if len(entries) > MAX_SHOWN_OF_KIND:
            left_out.append((kind, [str(one["path"]) for one in entries[MAX_SHOWN_OF_KIND:]]))
    return Changes(tuple(files), tuple(left_out))


def _lines(diff: object) -> tuple[int, int] | None:
    if not isinstance(diff, str):
        return None
    starts = [line[:1] for line in diff.split("\n")]
    return starts.count("+"), starts.count("-")


@dataclass(frozen=True, slots=True)
class Branch:
    """A node of a tree of files: a file or a directory. `entries` contains what is shown for this
    file or directory itself, and `below` contains the nodes in the directory.

    A node can have both, for example if a change replaces a directory by a file.
    """

    name: str
    entries: Sequence[Any]
    below: Sequence[Branch]


def tree_of(entries: Iterable[tuple[str, Any]]) -> Sequence[Branch]:
    """Arrange entries in a tree of directories, and return its top nodes. Each item of `entries` is
    a path and the entry at this path.

    If a directory has no entry and contains only one node, the directory and this node become one
    node with a name such as `a/b`.
    """
    return _branches([(path.split("/", MAX_DEPTH), entry) for path, entry in entries])


def _branches(rows: Iterable[tuple[Sequence[str], Any]]) -> Sequence[Branch]:
    own: dict[str, list[Any]] = {}
    inner: dict[str, list[tuple[Sequence[str], Any]]] = {}
    for (name, *rest), entry in rows:
        below = inner.setdefault(name, [])
        if rest:
            below.append((rest, entry))
        else:
            own.setdefault(name, []).append(entry)
    return [_branch(name, own.get(name, ()), _branches(inner[name])) for name in sorted(inner)]


def _branch(name: str, entries: Sequence[Any], below: Sequence[Branch]) -> Branch:
    if entries or len(below) != 1:
        return Branch(name, entries, below)
    return Branch(f"{name}/{below[0].name}", below[0].entries, below[0].below)


# -- programs in colours ----------------------------------------------------------------------

MAX_COLOURED = 10_000
"""Maximum length, in characters, of a program that is coloured. Some lexers take quadratic time."""

_CLASSES: Mapping[_TokenType, str] = MappingProxyType(
    {
        Keyword: "word",
        Comment: "comment",
        String: "string",
        Number: "number",
        Name.Builtin: "name",
        Name.Function: "name",
        Name.Class: "name",
        Name.Decorator: "name",
    }
)
_LEXERS = {"python": "python", "shell": "bash", "javascript": "javascript"}


def language_of(tool: str, argument: str) -> str:
    """Return the programming language of a tool's argument, or an empty text if it is not a
    program.
    """
    for language in LANGUAGES.values():
        if tool == language.tool and argument == language.source:
            return language.name
    return "python" if (tool, argument) == ("run_restricted_python", "code") else ""


def coloured(program: str, language: str) -> Markup | str:
    """Return a program as HTML with colours. If the program is too long or its language is unknown,
    return the program's text unchanged.
    """
    if language not in _LEXERS or len(program) > MAX_COLOURED:
        return program
    pieces = ((_class_of(kind), text) for kind, text in _lexer(language).get_tokens(program))
    runs = (
        (name, printable("".join(text for _, text in group)))
        for name, group in groupby(pieces, key=lambda piece: piece[0])
    )
    span = Markup('<span class="{}">{}</span>')
    return Markup("").join(span.format(name, text) if name else text for name, text in runs)


@cache
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(_LEXERS[language], stripnl=False, ensurenl=False)


@cache
def _class_of(kind: _TokenType) -> str:
    return next((name for of, name in _CLASSES.items() if kind in of), "")
