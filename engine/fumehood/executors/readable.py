"""The readable text of an HTML page: without markup, scripts and styles.

Host side, pure. The page is hostile: every pattern takes time linear to the page's length. What may
span tags runs in RE2; the patterns of single tags go on to no other `<` and give nothing back
(`*+`), and are faster in `re`. The text is for reading; nothing of it is safe to put into HTML.
"""

from __future__ import annotations

import html
import re

import re2

_INVISIBLE = ("script", "style", "template", "noscript", "svg", "iframe", "object")
_DROPPED = re2.compile(
    "(?is)<!--.*?(?:-->|\\z)|"
    + "|".join(rf"<{name}\b.*?(?:</{name}\s*>|\z)" for name in _INVISIBLE)
)
_QUOTED = r"(?:[^<>\"']++|\"[^\"<]*+\"|'[^'<]*+')*+"
_BREAK = re.compile(
    r"</?(?:address|article|aside|blockquote|body|br|dd|div|dl|dt|fieldset|figure|footer|form"
    r"|h[1-6]|head|header|hr|li|main|nav|ol|option|p|pre|section|table|td|th|title|tr|ul)"
    rf"(?![\w-]){_QUOTED}>",
    re.IGNORECASE,
)
_TAG = re.compile(rf"<[a-z/!?]{_QUOTED}>", re.IGNORECASE)
_OPEN_QUOTE = re.compile(r"<[a-z/!?][^<>]*+>", re.IGNORECASE)
"""A tag whose quotes do not end."""


def readable_text(page: str) -> str:
    """The text of a page, a line for each block."""
    text = _DROPPED.sub(" ", page)
    text = _OPEN_QUOTE.sub("", _TAG.sub("", _BREAK.sub("\n", text)))
    lines = (" ".join(line.split()) for line in _unescaped(text).splitlines())
    return "\n".join(line for line in lines if line)


def _unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character's number has more digits than Python reads
        return text
