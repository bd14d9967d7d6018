"""Removes the values of those secrets that a request contains from the service's answer to it.

Host side, pure. This protects secrets if a service repeats parts of the request in its answer, even
if they are encoded for URLs, JSON, HTML or base64, in bytes, or cut off. It does not protect
against a service that deliberately encodes a secret in another form (see
docs/limitations/rest-tools.md). All other redaction is in `redactor`.
"""

from __future__ import annotations

import base64
import html
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus

from fumehood.redaction.redactor import NUMERIC, REDACTED, complete, free_name

_PERCENT = re.compile("%[0-9A-F]{2}")
_PACKERS = (base64.b64encode, base64.urlsafe_b64encode)
_BASE64 = frozenset(f"{string.ascii_letters}{string.digits}+/-_")


@dataclass(frozen=True, slots=True)
class _Form:
    """One text that `SecretValues` searches for and replaces, because it reveals a secret's value.
    It is the value itself or an encoding of the value, such as base64.
    """

    text: str
    shares_first: bool = False
    """Whether the base64 character directly before the text also contains bits of the value."""
    shares_last: bool = False
    """Whether the base64 character directly after the text also contains bits of the value."""


class SecretValues:
    """Finds secret values in texts and replaces them by `[redacted]`. It also finds encoded
    values, in all forms in which services commonly repeat values, such as base64.

    The search takes time proportional to the length of the searched text, whatever the text
    contains, because it searches for each form in linear time.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.count = 0
        """How many occurrences of values have been replaced so far."""
        self._forms: list[_Form] = []
        self._in_numbers: list[str] = []
        """The forms that can occur in a number. A long list of numbers is searched only for these,
        because a search for all forms would take seconds.
        """
        self._shortest = 0
        self._are_in_lines = True
        self.add(values)

    def add(self, values: Iterable[str]) -> None:
        """Also replace these values from now on."""
        forms = {form for value in values for form in _forms(value)}
        self._forms = sorted({*self._forms, *forms}, key=lambda form: len(form.text), reverse=True)
        self._in_numbers = [one.text for one in self._forms if NUMERIC.fullmatch(one.text)]
        self._shortest = len(self._forms[-1].text) if self._forms else 0
        self._are_in_lines = not any("\n" in form.text for form in self._forms)

    @property
    def longest(self) -> int:
        """The length of the longest form in characters, or 0 if there is nothing to replace."""
        return len(self._forms[0].text) if self._forms else 0

    def finds(self, text: str) -> bool:
        """Whether the text contains one of the values, in any form."""
        return any(form.text in text for form in self._forms)

    def finds_in_name(self, name: str) -> bool:
        """Whether the name of a header contains one of the values, in any form. Upper and lower
        case are treated as equal.
        """
        return any(form.text.lower() in name.lower() for form in self._forms)

    def text(self, text: str) -> str:
        """Return the text with each value replaced."""
        if len(text) < self._shortest or not self._forms:
            return text
        return self.replaced(text, len(text), is_all=True)[0]

    def data(self, data: bytes) -> bytes:
        """Return the bytes with each value replaced."""
        return self.text(data.decode("latin-1")).encode("latin-1")

    def stream(self) -> SecretStream:
        """Return an object that replaces the values in a text that arrives in pieces. The caller
        must add all values first: the object can miss a value that is added later.
        """
        return SecretStream(self)

    def replaced(self, text: str, cut: int, *, is_all: bool) -> tuple[str, int]:
        """Replace the values that begin in `text` before the position `cut`. Return two values: the
        processed beginning of the text, and the position in `text` at which the rest begins.

        A value that begins before `cut` is replaced completely, even if it ends after `cut`. There
        is one exception: a form in base64 whose last bits are in the next base64 character
        (`shares_last`). If this character is not before `cut`, the value is left in the rest.

        `is_all` is True if `text` is complete. There is no exception then.
        """
        parts, at = list[str](), 0
        for start, end, form in self._found(text):
            first = start - (form.shares_first and start > at and text[start - 1] in _BASE64)
            if first >= cut:
                break
            if form.shares_last and end >= cut and not is_all:
                return "".join([*parts, text[at:first]]), first
            parts += [text[at:first], REDACTED]
            at = end + (form.shares_last and text[end : end + 1] in _BASE64)
            self.count += 1
        cut = max(cut, at)
        return "".join([*parts, text[at:cut]]), cut

    def complete(self, text: str) -> int:
        """Return the position up to which `text` can be processed now. All secret values that begin
        before this position also end in `text`. The text from this position on must be held back,
        because it may contain the beginning of a secret value.
        """
        # Add one to the longest form, for the base64 character that may precede it.
        longest = self.longest + 1 if self._forms else 0
        return complete(text, longest, in_lines=self._are_in_lines)

    def _found(self, text: str) -> Iterator[tuple[int, int, _Form]]:
        """Yield the start, the end and the form of each value in the text, from left to right. If
        several forms match at the same position, yield only the longest.
        """
        coming = [(at, form) for form in self._forms if (at := text.find(form.text)) >= 0]
        while coming:
            start, form = min(coming, key=lambda one: one[0])  # the first of equals: the longest
            end = start + len(form.text)
            yield start, end, form
            moved = [
                (at if at >= end else text.find(other.text, end), other) for at, other in coming
            ]
            coming = [one for one in moved if one[0] >= 0]

    def value(self, value: Any) -> Any:
        """Return a JSON value in which each secret value is replaced. This includes keys and
        numbers.
        """
        if not self._forms:
            return value
        match value:
            case str():
                return self.text(value)
            case dict():
                changed: dict[str, Any] = {}
                for key, element in value.items():
                    changed[free_name(self.text(key), changed)] = self.value(element)
                return changed
            case list():
                return [self.value(element) for element in value]
            case int() | float() if self._in_numbers:
                if not any(form in json.dumps(value) for form in self._in_numbers):
                    return value
                self.count += 1
                return REDACTED
            case _:
                return value


class SecretStream:
    """Replaces secret values in a text that arrives in pieces. Pass the pieces to `feed`, then call
    `finish`.
    """

    def __init__(self, values: SecretValues) -> None:
        self._values = values
        self._held = ""

    def feed(self, piece: str) -> str:
        """Add the next piece of the text. Return the text that can be passed on now, with each
        value replaced.
        """
        text = self._held + piece
        return self._pass_on(text, self._values.complete(text))

    def finish(self) -> str:
        """End the text. Return what was still held back, with each value replaced."""
        return self._pass_on(self._held, len(self._held), is_all=True)

    def _pass_on(self, text: str, cut: int, *, is_all: bool = False) -> str:
        passed, at = self._values.replaced(text, cut, is_all=is_all)
        self._held = text[at:]
        return passed


def _forms(value: str) -> set[_Form]:
    """Return the forms in which a service may repeat a secret value: unchanged, encoded for URLs,
    HTML forms, JSON or HTML, and in base64.

    The base64 forms also match inside a longer base64 text, such as the credentials of HTTP Basic
    authentication.
    """
    urls = {quote(value, safe=""), quote(value), quote_plus(value)}
    lower = {_PERCENT.sub(lambda found: found[0].lower(), url) for url in urls}
    in_json = json.dumps(value)[1:-1]
    # Some JSON encoders escape slashes, and answers in plain text contain such JSON as it is.
    texts = {value, in_json, in_json.replace("/", r"\/"), html.escape(value)}
    packed = {pack(value.encode()).decode() for pack in _PACKERS}
    whole = urls | lower | texts | packed | {text.rstrip("=") for text in packed}
    within = (_packed_within(value, pack, before) for pack in _PACKERS for before in range(3))
    return {*map(_Form, whole), *within}


def _packed_within(value: str, pack: Callable[[bytes], bytes], before: int) -> _Form:
    """Return the form in which a value occurs in base64 text if `before` other bytes precede it.
    `pack` encodes bytes in base64. The form consists of those characters that depend only on the
    value.
    """
    bits = 8 * (before + len(value))
    first = -(-8 * before // 6)
    text = pack(bytes(before) + value.encode())[first : bits // 6].decode()
    return _Form(text, shares_first=before > 0, shares_last=bits % 6 > 0)
