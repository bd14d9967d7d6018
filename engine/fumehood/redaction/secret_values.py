"""Remove the values of a request's secrets from the service's answer.

Host side, pure. It guards against services that echo a request, also encoded for URLs, JSON, HTML
or base64, in bytes and in texts that were cut; `redactor` does the rest of redaction. A service
that intends to reveal a secret can encode it in another form: see docs/limitations/rest-tools.md.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

from fumehood.redaction.redactor import NUMERIC, REDACTED, begun, free_name

_PERCENT = re.compile("%[0-9A-F]{2}")


class SecretValues:
    """Replaces the given values, in the forms that services commonly echo."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.count = 0
        """How many values were replaced so far."""
        self._forms: list[str] = []
        self._in_numbers: list[str] = []
        """The forms that can occur in a number. Searching for all forms in a long list of numbers
        would take seconds."""
        self.add(values)

    def add(self, values: Iterable[str]) -> None:
        """Replace these values as well."""
        forms = {form for value in values for form in _forms(value)}
        self._forms = sorted({*self._forms, *forms}, key=len, reverse=True)
        self._in_numbers = [form for form in self._forms if NUMERIC.fullmatch(form)]

    @property
    def longest(self) -> int:
        """The length of the longest form, or 0 if there is nothing to replace."""
        return len(self._forms[0]) if self._forms else 0

    def finds(self, text: str) -> bool:
        """Whether a text contains one of the values."""
        return any(form in text for form in self._forms)

    def text(self, text: str) -> str:
        """Return a text with each value replaced."""
        for form in self._forms:
            if form in text:
                self.count += text.count(form)
                text = text.replace(form, REDACTED)
        return text

    def data(self, data: bytes) -> bytes:
        """Return bytes with each value replaced."""
        for form in self._forms:
            self.count += data.count(form.encode())
            data = data.replace(form.encode(), REDACTED.encode())
        return data

    def stream(self) -> SecretStream:
        """Return a replacer for a text that arrives in pieces. All values must be known by now."""
        return SecretStream(self, self._forms)

    def value(self, value: Any) -> Any:
        """Return a JSON value with each of the secrets' values replaced, also in keys."""
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
    """Replaces the values in a text that arrives in pieces: `feed` them, then `finish`."""

    def __init__(self, values: SecretValues, forms: list[str]) -> None:
        self._values = values
        self._forms = forms
        self._pattern = re.compile("|".join(map(re.escape, forms)))
        self._held = ""

    def feed(self, piece: str) -> str:
        """Add a piece, and return the text that can be passed on now."""
        text = self._held + piece
        return self._pass_on(text, min((begun(text, f) for f in self._forms), default=len(text)))

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._pass_on(self._held, len(self._held))

    def _pass_on(self, text: str, cut: int) -> str:
        """Pass on the text up to `cut`. All matches that begin before it are complete."""
        parts, at = [], 0
        for match in self._pattern.finditer(text) if self._forms else ():
            if match.start() >= cut:
                break
            parts += [text[at : match.start()], REDACTED]
            at = match.end()
            self._values.count += 1
        cut = max(cut, at)
        self._held = text[cut:]
        return "".join([*parts, text[at:cut]])


def _forms(value: str) -> set[str]:
    """Return the forms in which a value may be echoed: as it is, and encoded for URLs, HTML forms,
    JSON, HTML and base64."""
    urls = {quote(value, safe=""), quote(value), quote_plus(value)}
    lower = {_PERCENT.sub(lambda found: found[0].lower(), url) for url in urls}
    in_json = json.dumps(value)[1:-1]
    # Some encoders of JSON escape slashes, and serve it as text, so nothing unescapes it here.
    texts = {value, in_json, in_json.replace("/", r"\/"), html.escape(value)}
    packed = {base64.b64encode(value.encode()), base64.urlsafe_b64encode(value.encode())}
    encoded = {text.decode() for text in packed}
    return urls | lower | texts | encoded | {text.rstrip("=") for text in encoded}
