"""Receipts as plain values: the inputs and results of a program's call. Also compares the receipts
of two runs.

Values only. Users supply receipts as files, so a receipt is validated as strictly as a request.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from operator import not_
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from fumehood.core.json_types import JsonObject
from fumehood.core.value import StrictValue

MAX_EXCHANGES = 1000

MAX_RECORDED_BYTES = 4 << 20
"""Maximum total size in bytes of the exchanges in a receipt, before they are encoded in base64. A
receipt within this limit fits into a request.
"""

REPEATED_OPTIONS = ("timeout_seconds", "memory_limit_mb", "isolation", "packages", "agent_id")
"""The call options that a receipt contains. It also contains `network`."""

SESSION_WISHES = ("image", "memory_mb", "cpus", "disk_mb", "packages")
"""The fields of a session that a receipt contains. They are enough to create a similar session."""


Text = Annotated[str, Field(max_length=64 * 1024)]

Header = Annotated[list[Text], Field(min_length=2, max_length=2)]
"""The name and the value of a header, decoded as Latin-1."""


def _require_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


class Exchange(StrictValue):
    """A request that a program sent, and the answer that it received. It contains no values of
    secrets.
    """

    method: Text
    url: Text
    body_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None
    """SHA-256 of the request's body, or null if the gateway refused the request without reading the
    body.
    """
    status: int = Field(ge=200, le=599)
    headers: list[Header] = Field(max_length=1000)
    body_base64: Annotated[str, AfterValidator(_require_base64)]

    @property
    def words(self) -> str:
        """The method and the URL of the request as one text for users."""
        return f"{self.method} {self.url}"


class Cassette(StrictValue):
    """The exchanges of one call's program, in the order in which the answers ended.

    `left_out` is the number of exchanges that could not be recorded, because they were too long or
    broke off, or because they were WebSockets or tunnels.
    """

    exchanges: list[Exchange] = Field(max_length=MAX_EXCHANGES)
    left_out: int = Field(default=0, ge=0)


class Receipt(StrictValue):
    """The inputs and the results of one call that ran a program, so that the call can be repeated.

    * `options` are the call options with which the call can be repeated.
    * `session` is the session of the call: its id, and the fields from which a similar session can
      be created.
    * `place` names the image, its digest, the runtime and the versions of packages.
    * `network` contains the program's requests and the answers to them.
    * `fields` are the fields of `data` in the call's answer. If the call failed, they are those of
      `error.details`.
    """

    format: Literal["fumehood.receipt.1"]
    call_id: str
    timestamp: str
    tool: str
    tool_version: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    session: dict[str, Any] | None = Field(exclude_if=not_, default=None)
    place: dict[str, Any] | None
    network: Cassette
    ended_by: str
    error: str | None = Field(exclude_if=not_, default=None)
    fields: dict[str, Any]


def differences(before: Receipt, after: Receipt) -> list[str]:
    """Return the differences between two runs as lines of text. A text with several lines is shown
    as a diff.
    """
    said: list[str] = []
    for name in ("tool_version", "ended_by", "error"):
        said += _changed(name, getattr(before, name), getattr(after, name))
    old, new = before.place or {}, after.place or {}
    for name in sorted({*old, *new}):
        said += _changed(name, old.get(name), new.get(name))
    earlier, later = _comparable(before.fields), _comparable(after.fields)
    for name in sorted({*earlier, *later} - {"ended_by"}):
        said += _changed(name, earlier.get(name), later.get(name))
    said += _requests(before.network, after.network)
    return said


def _changed(name: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    old, new = (one if isinstance(one, str) else json.dumps(one) for one in (before, after))
    if "\n" not in old + new:
        yield f"{name}: {old} → {new}"
        return
    from difflib import unified_diff  # not at the top: the engine loads this module

    yield f"{name}:"
    diff = list(unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1))[2:]
    yield from (f"  {line}" for line in diff)


def _comparable(fields: JsonObject) -> JsonObject:
    """Return the fields of an answer in a form in which two answers can be compared. Links and ids
    are left out, because they are different in every answer. A file is represented by its path,
    size and hash.
    """
    kept = {name: value for name, value in fields.items() if name not in ("files", "images")}
    if isinstance(session := kept.pop("session", None), dict):
        kept["session"] = session.get("state")
    for kind in ("files", "images"):
        files = fields.get(kind)
        for file in files if isinstance(files, list) else ():
            identity = {name: file.get(name) for name in ("size", "sha256")}
            kept[f"{kind}: {file.get('filename')}"] = json.dumps(identity)
    return kept


def _requests(before: Cassette, after: Cassette) -> Iterator[str]:
    def counted(cassette: Cassette) -> Counter[tuple[str, int]]:
        return Counter((one.words, one.status) for one in cassette.exchanges)

    was, now = counted(before), counted(after)
    for (words, status), count in (was - now).items():
        yield f"not sent any more: {words} (answered {status}){_times(count)}"
    for (words, status), count in (now - was).items():
        yield f"new: {words} (answered {status}){_times(count)}"


def _times(count: int) -> str:
    return f", {count} times" if count > 1 else ""
