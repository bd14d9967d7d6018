"""Colours of programs in pages, by Pygments.

Programs are untrusted. Each piece is escaped like any other text of a page; only the classes of the
spans around them are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import groupby
from types import MappingProxyType

from markupsafe import Markup
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType

from fumehood.core.escaping import printable
from fumehood.core.languages import LANGUAGES

MAX_COLOURED = 10_000
"""Characters of a program in colours: a page stays small, and no program takes long."""

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
    """Return the language of an argument of a tool, or an empty text."""
    for language in LANGUAGES.values():
        if tool == language.tool and argument == language.source:
            return language.name
    return "python" if (tool, argument) == ("run_restricted_python", "code") else ""


def coloured(program: str, language: str) -> Markup | str:
    """Return a program in colours, or as it is if it is too long or in no known language."""
    if language not in _LEXERS or len(program) > MAX_COLOURED:
        return program
    pieces = ((_class_of(kind), text) for kind, text in _lexer(language).get_tokens(program))
    lines = Markup("")
    for name, group in groupby(pieces, key=lambda piece: piece[0]):
        text = printable("".join(text for _, text in group))
        lines += Markup('<span class="{}">{}</span>').format(name, text) if name else text
    return lines


@cache
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(_LEXERS[language], stripnl=False, ensurenl=False)


@cache
def _class_of(kind: _TokenType) -> str:
    return next((name for of, name in _CLASSES.items() if kind in of), "")
