"""What the guest's program `files` answers, believed only in the agreed form.

Host side, pure. No user code runs in that program, but it shares a container with code that
did. Invariant: an answer is a value of a model here, whole, and fits what was asked, or it is
nothing; a path in it is plain and relative.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault

MAX_LISTED = 1000
"""Entries of one answer."""

MAX_READ_BYTES = 256 * 1024
"""Of a file in one answer."""

MAX_PUT_BYTES = 1 << 20
"""Of an upload in one piece."""

MAX_WRITE_BYTES = 8 << 20
"""Of a file that is written whole in one request."""

MAX_SIZE = 1 << 50
MAX_TIME_NS = 1 << 63
"""From 1970, either way: a program may have set any time."""

FaultKind = Literal[
    "not_found",
    "not_a_file",
    "link",
    "exists",
    "no_room",
    "not_empty",
    "changed",
    "invalid",
    "no_right",
    "unseen",
    "too_many",
    "not_as_seen",
]


class NotAsAgreed(Exception):
    """The answer has not the form that this engine's own guest gives it."""


class Claim(BaseModel):
    """A form that an answer, or a part of it, may have."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fault(Claim):
    """Why it was not done. Its message is the guest's word."""

    kind: FaultKind
    message: str = Field(max_length=1000)


class _Refusal(Claim):
    fault: Fault


class Entry(Claim):
    """One thing in a workspace."""

    path: str = Field(min_length=1, max_length=4096)
    kind: Literal["file", "directory", "link", "other"]
    size: int = Field(ge=0, le=MAX_SIZE)
    modified_ns: int = Field(gt=-MAX_TIME_NS, lt=MAX_TIME_NS)

    @field_validator("path")
    @classmethod
    def _is_plain(cls, value: str) -> str:
        if path_fault(value) is not None:
            raise ValueError("no plain path")
        return value


class Listing(Claim):
    """Entries in the order of their paths; `has_more` where there are more than were asked for."""

    entries: list[Entry] = Field(max_length=MAX_LISTED)
    has_more: bool


class Piece(Claim):
    """A part of a file. `version` is another one where the file has changed."""

    content_base64: str = Field(max_length=MAX_READ_BYTES * 4 // 3 + 4)
    size: int = Field(ge=0, le=MAX_SIZE)
    version: str = Field(max_length=200)

    @field_validator("content_base64")
    @classmethod
    def _is_base64(cls, value: str) -> str:
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("not base64") from None
        return value

    @property
    def content(self) -> bytes:
        """The bytes themselves."""
        return base64.b64decode(self.content_base64)


class Written(Claim):
    """The size of a file, or of what has come of an upload, after a write."""

    size: int = Field(ge=0, le=MAX_SIZE)


class Dropped(Claim):
    """An upload is forgotten."""


class NotDeleted(Claim):
    """A path that is still there, and why."""

    path: str = Field(max_length=4096)
    why: str = Field(max_length=1000)


class Deletion(Claim):
    """What became of each path."""

    deleted: list[str] = Field(max_length=MAX_LISTED)
    missing: list[str] = Field(max_length=MAX_LISTED)
    failed: list[NotDeleted] = Field(max_length=MAX_LISTED)

    def is_of(self, paths: list[str]) -> bool:
        """Whether it speaks of these paths and no others."""
        said = [*self.deleted, *self.missing, *(entry.path for entry in self.failed)]
        return set(said) == set(paths) and len(said) == len(set(paths))


def read_fault(result: JsonObject | None) -> Fault | None:
    """The refusal in an answer; None where it is none."""
    try:
        return _Refusal.model_validate(result).fault
    except ValidationError:
        return None


def read_answer(model: type[Any], result: JsonObject | None) -> Any:
    """The answer as a value of `model`.

    Raises:
        NotAsAgreed: it has another form.
    """
    try:
        return model.model_validate(result)
    except ValidationError:
        raise NotAsAgreed from None


def fitting_piece(piece: Piece, offset: int, length: int) -> bytes:
    """The bytes of a piece that was asked for: all that are there of it.

    Raises:
        NotAsAgreed: more or fewer bytes than the file has there.
    """
    content = piece.content
    if len(content) != min(length, max(0, piece.size - offset)):
        raise NotAsAgreed
    return content
