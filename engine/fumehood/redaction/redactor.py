"""Redaction: replaces secrets in texts, in JSON values, and in streams that arrive in pieces.

Host side, used by the executors, the pipeline and the log. A match is a secret that the engine has
learned, or a text that matches a pattern. Each match is replaced by `[redacted]` and counted.
Patterns run in RE2, so no text can stall the engine. Invariant: however a stream is split into
pieces, the same matches are replaced as in the whole text, if they have at most `MAX_HELD`
characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import re2
from pydantic import AfterValidator, Field
from pydantic_core import to_json

from fumehood.core.returned_file import FILE_CONTENT
from fumehood.core.value import Value


def _pattern(text: str) -> str:
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text, options)
    except re2.error as error:
        raise ValueError(f"is no RE2 pattern ({error})") from None
    if compiled.search("") is not None:
        raise ValueError("matches the empty text, so it would match everywhere")
    if compiled.groups:
        raise ValueError("has a group that captures; write (?:…)")
    return text


MAX_PATTERN_CHARACTERS = 1000
"""Maximum length in characters of an operator's pattern. A longer pattern would exceed RE2's memory
limit, and each search would then take seconds.
"""


class RedactionSettings(Value):
    """The operator's settings for redaction: what is replaced by `[redacted]` in results, streams,
    errors and the log.
    """

    common_keys: bool = True
    """Whether keys and tokens in well-known formats are replaced. These are the formats of clouds,
    code hosts and model providers, JSON Web Tokens, and private keys.
    """
    patterns: tuple[
        Annotated[str, Field(max_length=MAX_PATTERN_CHARACTERS), AfterValidator(_pattern)], ...
    ] = ()
    """Further patterns to replace, in RE2's syntax. In a stream, a match cannot extend over more
    than one line.
    """


REDACTED = "[redacted]"
MAX_HELD = 16 * 1024
"""Maximum number of characters of a stream that are held back until more text arrives."""

MIN_SECRET_CHARACTERS = 8
"""Minimum length of a secret in characters. A shorter secret would also match ordinary text."""

_ESCAPE = (
    r"\\{1,8}(?:[bfnrt]|u00[0-7][0-9A-Fa-f])"  # in JSON and in code
    r"|%(?:25){0,3}[0-9A-Fa-f]{2}"  # in a URL, even if it is nested in another
    r"|\x1b\[[0-9;]{0,16}m"  # the colours of a terminal
)
"""Matches an escape sequence. A word can begin after it, even if its last character is a letter."""

_BORDER = rf"(?:\b|{_ESCAPE})"
# *Source*: the formats of keys are from the providers' documentation, RFC 7468 and RFC 7519.
_PRIVATE_KEY = (
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\z)"
)
_COMMON_KEYS = (
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",
    r"gh[opsur]_[A-Za-z0-9]{36,}",
    r"github_pat_[A-Za-z0-9_]{22,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"sk[-_][A-Za-z0-9_-]{20,}",
    r"AIza[0-9A-Za-z_-]{35}",
    r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
)
_BEGINNINGS = (
    "AKIA", "ASIA", "gho_", "ghp_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "xoxa-",
    "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "sk-", "sk_", "AIza", "eyJ",
)  # fmt: skip
"""How keys in well-known formats begin. A key is recognized only at the beginning of a word."""
_KEY_BEGINS = "-----BEGIN "
_UNFINISHED = frozenset("".join(word[:-1] for word in (*_BEGINNINGS, _KEY_BEGINS)))
"""The characters with which a text can end in the middle of such a beginning, or of
`_KEY_BEGINS`.
"""
_KEY_HEADER = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_KEY_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY-----")
MAX_KEY_HEADER = 70
_WORD = re.compile(r"[A-Za-z0-9_]")
_PLAIN = re.compile(r"[ !#-\[\]-~]+")
_BEGINNING = re.compile(rf"{_BORDER}(?:{'|'.join(_BEGINNINGS)})", re.ASCII)
_ESCAPED = re.compile(rf"(?:{_ESCAPE})\Z")
_BEGUN_ESCAPE = re.compile(
    r"(?:\\{1,8}(?:[bfnrt]|u[0-9A-Fa-f]{0,4})?|%(?:25){0,3}[0-9A-Fa-f]{0,2}"
    r"|\x1b(?:\[[0-9;]{0,16}m?)?)\Z"
)
MAX_ESCAPE = 20
NUMERIC = re.compile(r"[-+.0-9e]+")
_LINE_END = re.compile(r"[\n\r](?=[^\n\r]*\Z)")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
"""Matches the base64 content of a file. Such content is not redacted, because a match in it would
be accidental. A field's name is not enough to recognize the content, because services and programs
can use the same name.
"""


class Redactor:
    """Replaces secrets in texts and JSON values by `[redacted]`. A match is a secret that `learn`
    has added, a text that matches a pattern in the settings or, if the settings have `common_keys`,
    a key in a well-known format.
    """

    def __init__(self, settings: RedactionSettings | None = None) -> None:
        self._settings = settings if settings is not None else RedactionSettings()
        self._secrets: frozenset[str] = frozenset()
        self._compile()

    def learn(self, secret: str) -> None:
        """Add a secret. From now on, `secret` is replaced wherever it occurs.

        Raises:
            ValueError: the secret is so short that it would also match ordinary text.
        """
        if len(secret) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"a secret has at least {MIN_SECRET_CHARACTERS} characters")
        if secret not in self._secrets:
            self._secrets |= {secret}
            self._compile()

    def text(self, text: str) -> tuple[str, int]:
        """Return the text in which each match is replaced by `[redacted]`, and the number of
        matches.
        """
        if self._pattern is None:
            return text, 0
        try:
            found: tuple[str, int] = self._pattern.subn(REDACTED, text)
        except UnicodeEncodeError:  # a lone surrogate, as in a file's name that is not UTF-8
            return self.text(text.encode("utf-8", "replace").decode())
        return found

    def is_clean(self, texts: Iterable[str]) -> bool:
        """Whether the texts certainly contain no secret to redact. If the result is False, the
        texts may still contain no secret.
        """
        if self._pattern is None:
            return True
        try:
            return self._pattern.search("\n".join(texts)) is None
        except UnicodeEncodeError:
            return False

    def line(self, text: str) -> str:
        """Return a short text in which each match is replaced by `[redacted]`."""
        return self.text(text)[0]

    def value(self, value: Any) -> tuple[Any, int]:
        """Redact a JSON value. Return the value with each match in its texts, keys and numbers
        replaced, and the number of matches.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            pairs = [self.value(element) for element in value]
            return [new for new, _ in pairs], sum(count for _, count in pairs)
        if not isinstance(value, dict):
            return self._number(value)
        changed: dict[str, Any] = {}
        total = 0
        for name, element in value.items():
            new_name, in_name = self.text(name)
            is_file = _is_file(name, element) and self.is_clean((element,))
            new, in_element = (element, 0) if is_file else self.value(element)
            changed[free_name(new_name, changed)] = new
            total += in_name + in_element
        return changed, total

    def _number(self, value: Any) -> tuple[Any, int]:
        """Redact a number. Return a pair. Its first element is `[redacted]` if the number contains
        a match, and otherwise the number itself. Its second element is the number of matches. None,
        True and False are returned unchanged, with 0 matches.
        """
        if not self._reads_numbers or isinstance(value, bool) or value is None:
            return value, 0
        count = self.text(str(value))[1]
        return (REDACTED, count) if count else (value, 0)

    def may_match(self, encoded: bytes) -> bool:
        """Whether a value may contain a secret to redact. `encoded` is the value as JSON. If the
        result is False, the value certainly contains no secret. This check is fast, so it may
        return True for a value without a secret.
        """
        return self._pattern is not None and (
            self._beginnings is None or self._beginnings.search(encoded) is not None
        )

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return a log event with each match replaced. This is fast if there is no match."""
        try:
            encoded = to_json(event, fallback=str)
        except ValueError:  # a lone surrogate
            encoded = None
        if encoded is not None and not self.may_match(encoded):
            return event
        redacted: dict[str, Any] = self.value(event)[0]
        return redacted

    def stream(self) -> StreamRedactor:
        """Return an object that redacts one stream."""
        return StreamRedactor(self)

    def piece(self, text: str, start: int, end: int) -> tuple[str, int]:
        """Redact the part `text[start:end]` of a text. Return this part with each match replaced,
        and the number of matches.

        The text before `start` is not returned. It only decides whether a word begins at `start`.
        """
        if self._pattern is None:
            return text[start:end], 0
        parts, at, count = [], start, 0
        for match in self._pattern.finditer(text[:end], start):
            first, last = match.span()
            parts += [text[at:first], REDACTED]
            at, count = last, count + 1
        return "".join([*parts, text[at:end]]), count

    def settled(self, text: str, start: int) -> int:
        """Return the position in `text` up to which a stream can be redacted and passed on now. The
        rest must be held back, because it may contain the beginning of a match that continues in
        the next piece of the stream.

        `text` is the end of the stream so far. Its part before `start` was already passed on.
        """
        if self._pattern is None:
            return len(text)
        if self._settings.patterns:
            # An operator's pattern can match any text, so each line is held back until it is
            # complete.
            border = _LINE_END.search(text)
            cut = border.end() if border is not None else 0
        else:
            cut = len(text)
        cut = min(cut, complete(text, self._longest, in_lines=self._are_in_lines))
        if self._settings.common_keys:
            cut = min(cut, _begun_key(text))
        cut = max(cut, start)
        if len(text) - cut > MAX_HELD:
            cut = len(text) - MAX_HELD // 2
        if self._settings.common_keys:
            escape = _BEGUN_ESCAPE.search(text, max(start, cut - MAX_ESCAPE), cut)
            cut = escape.start() if escape is not None else cut
        if cut == len(text):
            return cut
        for match in self._pattern.finditer(text, start):
            first, last = match.span()
            if first < cut < last:
                return int(first if last - first <= MAX_HELD else last)
        return cut

    def _compile(self) -> None:
        common = self._settings.common_keys
        secrets = sorted(self._secrets, key=len, reverse=True)
        self._longest = len(secrets[0]) if secrets else 0
        self._are_in_lines = not any("\n" in secret for secret in secrets)
        parts = [re2.escape(secret) for secret in secrets]
        parts += [f"(?:{pattern})" for pattern in self._settings.patterns]
        parts += [_PRIVATE_KEY, f"{_BORDER}(?:{'|'.join(_COMMON_KEYS)})"] if common else []
        self._pattern = re2.compile("|".join(parts)) if parts else None
        # Numbers are only searched if they can match: no key in a well-known format is a number.
        self._reads_numbers = bool(self._settings.patterns) or any(map(NUMERIC.fullmatch, secrets))
        words = [re2.escape(word) for word in (*secrets, *(_BEGINNINGS if common else ()))]
        words += [_KEY_BEGINS] if common else []
        # JSON can write other characters in several ways, and an operator's pattern can match
        # anything. In these cases `may_match` cannot search JSON for the beginnings.
        is_plain = all(map(_PLAIN.fullmatch, secrets)) and not self._settings.patterns
        self._beginnings = re2.compile("|".join(words).encode()) if words and is_plain else None


class StreamRedactor:
    """Redacts a text that arrives in pieces. Pass each piece to `feed`, then call `finish` once.
    `count` is the number of matches so far.
    """

    def __init__(self, redactor: Redactor) -> None:
        self.count = 0
        self._redactor = redactor
        self._held = ""
        self._before = ""
        """The last character that was passed on. It decides whether a word begins at the next
        one.
        """

    def feed(self, piece: str) -> str:
        """Add the next piece of the stream. Return the text that can be passed on now, with each
        match replaced.
        """
        text = self._before + self._held + piece
        return self._pass_on(text, self._redactor.settled(text, len(self._before)))

    def finish(self) -> str:
        """End the stream. Return the text that was still held back, with each match replaced."""
        text = self._before + self._held
        return self._pass_on(text, len(text))

    def _pass_on(self, text: str, cut: int) -> str:
        passed, count = self._redactor.piece(text, len(self._before), cut)
        self._before, self._held = text[max(cut - 1, 0) : cut], text[cut:]
        self.count += count
        return passed


def free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return `name`. If `taken` already contains this name, return it with a number added.

    This is needed because redaction can make two names equal.
    """
    number, free = len(taken), name
    while free in taken:
        number, free = number * 2, f"{name} {number + 1}"
    return free


def _is_file(name: str, value: Any) -> bool:
    """Whether a field with this name and value contains the bytes of a file as base64."""
    return name == FILE_CONTENT and isinstance(value, str) and bool(_BASE64.fullmatch(value))


def complete(text: str, longest: int, *, in_lines: bool) -> int:
    """Return the first position in `text` at which an incomplete secret may begin. Every secret
    that begins before this position also ends in `text`.

    `longest` is the length of the longest secret, or 0 if there are no secrets. `in_lines` says
    that no secret contains a line break.
    """
    # The result must not depend on the content of the secrets. If it did, the author of a text
    # could see how much is held back, and so guess a secret character by character.
    line = text.rfind("\n") + 1 if in_lines else 0
    return max(line, len(text) - max(0, longest - 1))


def _begun(text: str, word: str) -> int:
    """Return the position at which `word` begins if `text` ends with an incomplete `word`. If there
    are several such positions, return the first. If there is none, return the length of `text`.

    Use this function only for words that are not secret, because the result reveals how much of
    `word` is at the end of `text`.
    """
    end = len(text)
    for length in range(min(len(word) - 1, end), 0, -1):
        if text.endswith(word[:length]):
            return end - length
    return end


def _begun_key(text: str) -> int:
    """If `text` ends with what may be an incomplete key in a well-known format, return the position
    where this key begins. Otherwise return the length of the text.

    Only the last word is searched, except for private keys, which have several lines.
    """
    cut = _unfinished_private_key(text)
    last_word = "" if not text or text[-1].isspace() else text.rsplit(None, 1)[-1]
    begins = _BEGINNING.search(text, len(text) - len(last_word))
    if begins is not None:
        return min(cut, begins.start())
    if not text or text[-1] not in _UNFINISHED:
        return cut
    starts = [_begun(text, beginning) for beginning in _BEGINNINGS]
    starts = [start for start in starts if _is_border(text, start)]
    return min(cut, _begun(text, _KEY_BEGINS), *starts)


def _is_border(text: str, at: int) -> bool:
    """Whether a word may begin at the position `at` of the text."""
    if at == 0 or not _WORD.match(text[at - 1]):
        return True
    return _ESCAPED.search(text, max(0, at - MAX_ESCAPE), at) is not None


def _unfinished_private_key(text: str) -> int:
    """If `text` ends in the middle of a private key, return the position where the key begins.
    Otherwise return the length of the text.
    """
    begins = text.rfind(_KEY_BEGINS)
    if begins < 0:
        return len(text)
    header = _KEY_HEADER.match(text, begins)
    if header is None:  # its first line may not be complete
        return begins if len(text) - begins < MAX_KEY_HEADER else len(text)
    return len(text) if _KEY_END.search(text, header.end()) else begins
