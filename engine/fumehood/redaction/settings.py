"""The operator's settings of redaction. Values only."""

from __future__ import annotations

from typing import Annotated

import re2
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_PATTERN_CHARACTERS = 1000


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


class RedactionSettings(BaseModel):
    """What is replaced by `[redacted]` in results, streams, errors and the log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    common_keys: bool = True
    """Keys and tokens that are known by their form: of clouds, code hosts and model providers,
    JSON Web Tokens, and private keys."""
    patterns: tuple[
        Annotated[str, Field(max_length=MAX_PATTERN_CHARACTERS), AfterValidator(_pattern)], ...
    ] = ()
    """More patterns, in RE2's syntax. In a stream a match cannot reach beyond its line."""
