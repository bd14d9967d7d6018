"""What the guest's program `files` says a call would look at and change, believed only as agreed.

Host side, pure. Invariant: a survey is of the paths that were asked for and their surroundings, in
order, without a name twice; where it is whole, its hash is the hash of what is shown.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fumehood.executors.workspace_claims import MAX_SIZE, Claim, FaultKind
from fumehood.model.json_types import JsonObject

FORMAT = b"fumehood.survey.1\n"
"""As the guest's `survey` begins its manifest."""

MAX_SHOWN = 1000
MAX_COUNT = 200_000
MAX_TEXT = 4 * 4096
"""Characters of a path of which every byte had to be escaped."""

MAX_FILE_MODE = 0o7777

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Seen(Claim):
    """One name in the workspace, and what it stood for. `absent` is a name that nothing has."""

    path: str = Field(min_length=1, max_length=MAX_TEXT)
    path_base64: str | None = Field(default=None, max_length=MAX_TEXT)
    """The bytes of a path that is no UTF-8; `path` shows it escaped then."""
    kind: Literal["absent", "file", "directory", "link", "other"]
    mode: int | None = Field(default=None, ge=0, le=MAX_FILE_MODE)
    size: int | None = Field(default=None, ge=0, le=MAX_SIZE)
    links: int | None = Field(default=None, ge=1, le=1 << 32)
    """Names that the file has, in the workspace or elsewhere."""
    sha256: Sha256 | None = None
    version: str | None = Field(default=None, min_length=1, max_length=200)
    """In place of the hash, of a file that could not be read."""
    target: str | None = Field(default=None, max_length=MAX_TEXT)
    target_base64: str | None = Field(default=None, max_length=MAX_TEXT)
    special: Literal["pipe", "socket", "device", "unknown"] | None = None

    @model_validator(mode="after")
    def _is_one_of_its_kind(self) -> Seen:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        given -= {"path", "path_base64", "kind", "target_base64"}
        allowed: dict[str, tuple[set[str], ...]] = {
            "absent": (set(),),
            "file": (
                {"mode", "size", "links", "sha256"},
                {"mode", "size", "links", "version"},
            ),
            "directory": ({"mode"},),
            "link": ({"mode", "target"},),
            "other": ({"mode", "special"},),
        }
        if given not in allowed[self.kind]:
            raise ValueError("fields of another kind")
        _bytes_of(self.target or "", self.target_base64)
        parts = self.raw_path.split(b"/")
        if b"\0" in self.raw_path or any(part in (b"", b".", b"..") for part in parts):
            raise ValueError("no plain path")
        return self

    @property
    def raw_path(self) -> bytes:
        """The path as the file system has it."""
        return _bytes_of(self.path, self.path_base64)

    def line(self) -> bytes:
        """As it stands in the manifest."""
        return line(self.model_dump(exclude_none=True))


class PathOutcome(Claim):
    """What would become of one path: done, or refused."""

    path: str = Field(max_length=4096)
    fault: FaultKind | None


class Appended(Claim):
    """A file after something was added to it."""

    size: int = Field(ge=0, le=MAX_SIZE)
    sha256: Sha256


class Survey(Claim):
    """Everything that a call looks at or changes, by path; `base` is the hash of all of it."""

    base: Sha256
    entries: list[Seen] = Field(max_length=MAX_SHOWN)
    has_more: bool
    outcomes: list[PathOutcome] = Field(max_length=100)
    appended: Appended | None
    count: int = Field(ge=0, le=MAX_COUNT)
    """Of what is there and lies at or below a path that is not refused."""
    size: int = Field(ge=0, le=MAX_SIZE * 1024)
    """Bytes of these files."""

    def is_of(self, paths: Sequence[str]) -> bool:
        """Whether it speaks of these paths alone, each once and in order, and fits together."""
        if [outcome.path for outcome in self.outcomes] != list(paths):
            return False
        raw = [entry.raw_path for entry in self.entries]
        if not all(one < other for one, other in pairwise(raw)):
            return False
        asked = [path.encode() for path in paths]
        if not all(_is_near(path, asked) for path in raw):
            return False
        if self.has_more:
            return True  # the rest of the manifest is the guest's word
        going = self.going()
        shown = (len(going), sum(entry.size or 0 for entry in going))
        return self.base == self._base() and shown == (self.count, self.size)

    def at(self, path: str) -> Seen | None:
        """What a path stands for, where it was looked at."""
        return next((entry for entry in self.entries if entry.raw_path == path.encode()), None)

    def going(self) -> list[Seen]:
        """What is there, and lies at or below a path that is not refused."""
        tops = [one.path.encode() for one in self.outcomes if one.fault is None]
        return [
            entry
            for entry in self.entries
            if entry.kind != "absent" and any(_is_within(entry.raw_path, top) for top in tops)
        ]

    def _base(self) -> str:
        total = hashlib.sha256(FORMAT)
        for part in self._lines():
            total.update(part)
        return total.hexdigest()

    def _lines(self) -> Iterator[bytes]:
        yield from (entry.line() for entry in self.entries)
        yield from (line(outcome.model_dump()) for outcome in self.outcomes)


def line(value: JsonObject) -> bytes:
    """One value as one line of a manifest: sorted keys, ASCII, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii") + b"\n"


def _bytes_of(text: str, encoded: str | None) -> bytes:
    """The name itself. Raises ValueError where text and bytes are not of one name."""
    if encoded is None:
        return text.encode()
    raw = base64.b64decode(encoded, validate=True)
    if raw.decode("utf-8", "backslashreplace") != text:
        raise ValueError("another name")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    raise ValueError("bytes of a name that is text")


def _is_within(path: bytes, top: bytes) -> bool:
    return path == top or path.startswith(top + b"/")


def _is_near(path: bytes, asked: Sequence[bytes]) -> bool:
    """Whether a path is one that was asked for, lies below one, or leads to one."""
    return any(_is_within(path, one) or _is_within(one, path) for one in asked)
