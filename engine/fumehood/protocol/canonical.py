"""Canonical JSON and its hash: each JSON value has exactly one canonical text.

Host side. The text follows RFC 8785. That format supports doubles only, so integers beyond 2^53 - 1
are written as `{"$integer": "digits"}`. If a key begins with `$`, another `$` is written before it,
so that no two values have the same text.
"""

from __future__ import annotations

import hashlib
from json.encoder import encode_basestring
from typing import Any

import rfc8785

from fumehood.protocol.strict_json import MAX_SAFE_INTEGER


def canonical(value: Any) -> bytes:
    """Return the canonical text of a JSON value, as UTF-8. Equal values have the same canonical
    text.

    Raises:
        ValueError: the value is not a JSON value.
    """
    return _text(value).encode()


def digest_of(value: Any) -> str:
    """Return the SHA-256 hash of a value's canonical text, as hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _text(value: Any) -> str:
    """Return the canonical text of a JSON value.

    Strings are encoded without the library `rfc8785`, but in the same form. The library would take
    seconds for a string of a few MB with many line breaks.
    """
    if isinstance(value, str):
        return encode_basestring(value)
    if isinstance(value, int) and not isinstance(value, bool):
        digits = str(int(value))
        return digits if abs(value) <= MAX_SAFE_INTEGER else f'{{"$integer":"{digits}"}}'
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if not isinstance(value, dict):
        return rfc8785.dumps(value).decode()
    if not all(isinstance(key, str) for key in value):
        raise ValueError("object keys must be strings")
    named = [(f"${key}" if key.startswith("$") else key, item) for key, item in value.items()]
    named.sort(key=lambda one: one[0].encode("utf-16be"))
    return f"{{{','.join(f'{encode_basestring(key)}:{_text(item)}' for key, item in named)}}}"
