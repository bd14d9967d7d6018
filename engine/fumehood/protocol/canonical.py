"""Canonical JSON and its hash: one text for each value.

Host side. RFC 8785 supports doubles only, so integers beyond 2^53 - 1 are written as `{"$integer":
"digits"}`; keys that begin with `$` get another `$`, so that no two values have the same text.
"""

from __future__ import annotations

import hashlib
from typing import Any

import rfc8785

MAX_SAFE_INTEGER = 2**53 - 1
"""*Source*: RFC 8785, section 3.2.2.3, by way of I-JSON."""


def canonical(value: Any) -> bytes:
    """The canonical text of a JSON value.

    Raises:
        ValueError: it is not a JSON value.
    """
    try:
        return rfc8785.dumps(_plain(value))
    except rfc8785.CanonicalizationError as error:
        raise ValueError(str(error)) from None


def digest_of(value: Any) -> str:
    """SHA-256 over the canonical text, in hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"${key}" if key.startswith("$") else key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_SAFE_INTEGER:
        return {"$integer": str(value)}
    return value
