"""What the guest's program `files` says a call would look at and change, believed only as agreed.

Host side, pure. Invariant: a survey is of the paths that were asked for and their surroundings, in
order, without a name twice; where it is whole, its hash is the hash of what is shown.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fumehood.core.json_types import JsonObject
from fumehood.executors.workspace_claims import MAX_SIZE, Claim, FaultKind, NotAsAgreed

FORMAT = b"fumehood.survey.1\n"
"""As the guest's `survey` begins its manifest."""

MAX_SHOWN = 1000
MAX_PATHS = 100
"""Of one request, as the arguments are checked."""

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


class Appended(Claim):
    """A file after something was added to it."""

    size: int = Field(ge=0, le=MAX_SIZE)
    sha256: Sha256


class SurveyClaim(Claim):
    """Everything that a call looks at or changes, by path; `base` is the hash of all of it."""

    base: Sha256
    entries: list[Seen] = Field(max_length=MAX_SHOWN)
    has_more: bool
    faults: list[FaultKind | None] = Field(max_length=MAX_PATHS)
    """Why each path that was asked for would be refused, in their order; null where it is not."""
    appended: Appended | None
    count: int = Field(ge=0, le=MAX_COUNT)
    """Of what is there and lies at or below a path that is not refused."""
    size: int = Field(ge=0, le=MAX_SIZE * 1024)
    """Bytes of these files."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A survey of certain paths that fits together."""

    claim: SurveyClaim
    faults: Mapping[str, FaultKind | None]
    """By path, in the order in which they were asked for."""
    entries: Mapping[bytes, Seen]

    def at(self, path: str) -> Seen | None:
        """What a path stands for, where it was looked at."""
        return self.entries.get(path.encode())

    @property
    def going(self) -> list[Seen]:
        """What is there, and lies at or below a path that is not refused."""
        tops = {path.encode() for path, fault in self.faults.items() if fault is None}
        return [
            entry
            for path, entry in self.entries.items()
            if entry.kind != "absent" and not tops.isdisjoint(_way(path))
        ]


def read_survey(claim: SurveyClaim, paths: Sequence[str]) -> Survey:
    """The survey of these paths, which are all different.

    Raises:
        NotAsAgreed: it is of others, out of order, or does not fit its own hash and counts.
    """
    entries = {entry.raw_path: entry for entry in claim.entries}
    if len(claim.faults) != len(paths) or len(entries) != len(claim.entries):
        raise NotAsAgreed
    if not all(one < other for one, other in pairwise(entries)):
        raise NotAsAgreed
    asked = {path.encode() for path in paths}
    leading = {one for path in asked for one in _way(path)}
    if not all(path in leading or not asked.isdisjoint(_way(path)) for path in entries):
        raise NotAsAgreed
    survey = Survey(claim, dict(zip(paths, claim.faults, strict=True)), entries)
    going = survey.going
    count, size = len(going), sum(entry.size or 0 for entry in going)
    if claim.has_more:  # the rest of the manifest is the guest's word
        fits = count <= claim.count and size <= claim.size
    else:
        fits = (count, size, _base(survey)) == (claim.count, claim.size, claim.base)
    if not fits:
        raise NotAsAgreed
    return survey


def _base(survey: Survey) -> str:
    total = hashlib.sha256(FORMAT)
    for entry in survey.entries.values():
        total.update(line(entry.model_dump(exclude_none=True)))
    for path, fault in survey.faults.items():
        total.update(line({"path": path, "fault": fault}))
    return total.hexdigest()


def _way(path: bytes) -> Iterator[bytes]:
    """A path and all that lead to it."""
    while path:
        yield path
        path = path.rpartition(b"/")[0]


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
