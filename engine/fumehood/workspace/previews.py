"""Previews of calls that change a session's files. A human sees the preview and decides on the
call.

Host side. A preview is based on a *survey*: the guest's program `files` reports the state of all
paths that the call reads or changes, and this module validates the form of the report. The field
`base` is the hash of this state. When the approved call runs, the guest makes the survey again, and
refuses the request if the hash is no longer `base`. The host does not recompute the hash, because a
hostile guest could forge the whole survey anyway. Invariants:

* `base` is the hash of everything that was surveyed.
* `effect` is the hash of the state that is expected after the call, for all paths that the call
  changes or is not allowed to change.
* A write is refused if its survey does not fit into one answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from pydantic import Field

from fumehood.core.arguments import MAX_FILES, MAX_READ_BYTES
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.claims import Claim
from fumehood.executors.effects import Effect, Sha256, diff_of, shown_changes
from fumehood.executors.workspace_guest import (
    FAULT_WORDS,
    MAX_LISTED,
    Deletion,
    FaultKind,
    NotDeleted,
    Piece,
    ask,
    not_as_agreed,
    refusal_of,
)
from fumehood.protocol import strict_json
from fumehood.sandbox.wall import Lease
from fumehood.workspace.requests import (
    content_of,
    delete_request,
    deletion_error,
    write_request,
)

T = TypeVar("T")

NEW_FILE_MODE = 0o644
NEW_DIRECTORY_MODE = 0o755
"""The modes with which the guest creates files and directories."""

MAX_FILE_MODE = 0o7777
"""The largest possible file mode: all permission bits, set-user-ID, set-group-ID and sticky."""


async def effect_of(
    tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
) -> Effect | None:
    """Return the effect that a call of `tool` would have on the leased session. Return None if the
    tool's executor has no previews.

    Raises:
        InvalidParams: the guest cannot report the state of all paths that the call reads or
            changes, because there are too many paths or a path is unreadable.
        EngineError: the guest has refused to report the state. The call itself would fail with the
            same error.
    """
    preview = PREVIEWS.get(tool.executor)
    return None if preview is None else await preview(arguments, _Place(lease, limits))


@dataclass(frozen=True, slots=True)
class _Place:
    lease: Lease
    limits: Limits

    async def survey(self, request: JsonObject, paths: list[str]) -> Survey:
        survey = {"do": "survey", "of": request, "most": MAX_LISTED}
        claim = (await ask(self.lease, survey, self.limits, SurveyClaim)).required
        if len(claim.faults) != len(paths):
            raise not_as_agreed()
        return Survey(claim, dict(zip(paths, claim.faults, strict=True)))

    async def read(self, path: str, seen: Seen) -> bytes:
        """Return the content of the file `path`. The file must not be longer than `MAX_READ_BYTES`.

        `seen` is the state of the file that the guest has reported. Raises EngineError if the
        content has another size or hash than `seen`.
        """
        size = seen.size or 0
        request = {"do": "read", "path": path, "offset": 0, "length": MAX_READ_BYTES}
        piece = (await ask(self.lease, request, self.limits, Piece)).required
        content = piece.content
        if len(content) != size or hashlib.sha256(content).hexdigest() != seen.sha256:
            raise not_as_agreed()
        return content


# -- write -------------------------------------------------------------------------------


async def _effect_of_write(arguments: JsonObject, place: _Place) -> Effect:
    path, content = arguments["path"], content_of(arguments)
    request = write_request(arguments)
    if request["mode"] != "append":
        request["content_base64"] = ""  # only an append needs it, for the resulting file's hash
    survey = await place.survey(request, [path])
    if survey.claim.has_more:
        raise InvalidParams(FAULT_WORDS["unseen"], fields=["path"], details={"fault": "unseen"})
    fault = survey.faults[path]
    if fault is not None:
        error = refusal_of(fault)
        afterwards = _hash([{"path": path, "fault": fault}])
        return Effect(shown_changes(would_fail=error), survey.claim.base, afterwards, error)
    target = _agreed(survey.at(path))
    if target.kind == "absent":
        return await _effect_of_new_file(path, content, survey)
    if target.kind != "file" or request["mode"] == "create":
        raise not_as_agreed()
    return await _effect_of_change(request, content, target, survey, place)


async def _effect_of_new_file(path: str, content: bytes, survey: Survey) -> Effect:
    made = [
        {"path": parent, "kind": "directory", "mode": NEW_DIRECTORY_MODE}
        for parent in _lacking_above(path, survey)
    ]
    file = {"path": path, "kind": "file", "mode": NEW_FILE_MODE, **_figures(content)}
    added = [{**directory, "mode": _mode(NEW_DIRECTORY_MODE)} for directory in made]
    added.append({**file, "mode": _mode(NEW_FILE_MODE), **await diff_of(b"", content)})
    return Effect(shown_changes(added=added), survey.claim.base, _hash([*made, file]))


async def _effect_of_change(
    request: JsonObject, content: bytes, target: Seen, survey: Survey, place: _Place
) -> Effect:
    path, size, mode = request["path"], target.size or 0, target.mode or 0
    is_append = request["mode"] == "append"
    after: JsonObject = {"mode": NEW_FILE_MODE, **_figures(content)}
    if is_append:
        appended = _agreed(survey.claim.appended)
        if appended.size != size + len(content) or target.sha256 is None:
            raise not_as_agreed()
        after = {"mode": mode, **appended.model_dump()}
    changed: JsonObject = {
        "path": path,
        "before": {
            "mode": _mode(mode),
            "size": size,
            **({} if target.sha256 is None else {"sha256": target.sha256}),
        },
        "after": {**after, "mode": _mode(after["mode"])},
    }
    if is_append and target.links not in (None, 1):
        changed["other_names"] = (target.links or 1) - 1
    if target.sha256 is None:
        changed["unread"] = True
    elif max(size, after["size"]) > MAX_READ_BYTES:
        changed["too_large"] = True
    else:
        before = await place.read(path, target)
        whole = before + content if is_append else content
        if hashlib.sha256(whole).hexdigest() != after["sha256"]:
            raise not_as_agreed()
        changed |= await diff_of(before, whole)
    effect = _hash([{"path": path, "kind": "file", **after}])
    return Effect(shown_changes(changed=[changed]), survey.claim.base, effect)


def _lacking_above(path: str, survey: Survey) -> list[str]:
    """Return those parent directories of `path` that do not exist according to `survey`, topmost
    first. The call would create them.
    """
    parts = path.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts))]
    for number, parent in enumerate(above):
        seen = survey.at(parent)
        if seen is None or seen.kind == "absent":
            return above[number:]
    return []


# -- delete ------------------------------------------------------------------------------


async def _effect_of_deletion(arguments: JsonObject, place: _Place) -> Effect:
    request = delete_request(arguments)
    survey = await place.survey(request, request["paths"])
    kept = {
        path: fault for path, fault in survey.faults.items() if fault not in (None, "not_found")
    }
    foreseen = Deletion(
        deleted=[] if kept else [path for path, fault in survey.faults.items() if fault is None],
        missing=[path for path, fault in survey.faults.items() if fault == "not_found"],
        failed=[
            NotDeleted(path=path, why=FAULT_WORDS[fault or "invalid"])
            for path, fault in kept.items()
        ],
    )
    error = deletion_error(foreseen)
    shown = shown_changes(
        removed=[_removed(entry) for entry in survey.going],
        missing=foreseen.missing,
        kept=[entry.model_dump() for entry in foreseen.failed],
        count=survey.claim.count,
        size=survey.claim.size,
        truncated=survey.claim.has_more,
        would_fail=error,
    )
    afterwards: list[JsonObject] = [
        {"path": path, "fault": fault} if path in kept else {"path": path, "kind": "absent"}
        for path, fault in survey.faults.items()
    ]
    return Effect(shown, survey.claim.base, _hash(afterwards), error)


def _removed(entry: Seen) -> JsonObject:
    """Return the JSON with which a preview shows an entry that the call would delete."""
    shown = entry.model_dump(exclude_none=True, exclude={"version"})
    if entry.mode is not None:
        shown["mode"] = _mode(entry.mode)
    return {**shown, "unread": True} if entry.version is not None else shown


# -- shared by write and delete -----------------------------------------------------------


def _figures(content: bytes) -> JsonObject:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _mode(mode: int) -> str:
    return f"{mode:04o}"


def _agreed(value: T | None) -> T:
    """Return `value`, which the guest must provide. Raises SandboxUnavailable if it is None."""
    if value is None:
        raise not_as_agreed()
    return value


def _hash(manifest: list[JsonObject]) -> str:
    total = hashlib.sha256(b"fumehood.effect.1\n")
    for entry in manifest:
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        total.update(text.encode("ascii") + b"\n")
    return total.hexdigest()


PREVIEWS: Mapping[str, Callable[[JsonObject, _Place], Awaitable[Effect]]] = MappingProxyType(
    {"workspace:write": _effect_of_write, "workspace:delete": _effect_of_deletion}
)
"""Name of an executor → the function that previews its calls."""


# -- surveys -------------------------------------------------------------------------------


class Seen(Claim):
    """The state of one path in the workspace. If nothing exists at the path, `kind` is `absent`."""

    path: str = Field(min_length=1)
    path_base64: str | None = None
    """The bytes of the path if they are not UTF-8. Then `path` contains the path in an escaped
    form.
    """
    kind: Literal["absent", "file", "directory", "link", "other"]
    mode: int | None = Field(default=None, ge=0, le=MAX_FILE_MODE)
    size: int | None = Field(default=None, ge=0, le=strict_json.MAX_SAFE_INTEGER)
    links: int | None = Field(default=None, ge=1, le=1 << 32)
    """Number of the file's hard links, including those outside the workspace."""
    sha256: Sha256 | None = None
    version: str | None = Field(default=None, min_length=1, max_length=200)
    """If the file cannot be read, a value to use instead of `sha256`. It changes whenever the file
    changes.
    """
    target: str | None = None
    target_base64: str | None = None
    special: Literal["pipe", "socket", "device", "unknown"] | None = None


class Appended(Claim):
    """The size in bytes and the hash that a file would have after the previewed append."""

    size: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)
    sha256: Sha256


class SurveyClaim(Claim):
    """The guest's answer to a survey: the state of everything that a call reads or changes, sorted
    by path.

    If `has_more` is True, some entries are left out. `base` is the hash of the whole state,
    including entries that are left out.
    """

    base: Sha256
    entries: list[Seen] = Field(max_length=MAX_LISTED)
    has_more: bool
    faults: list[FaultKind | None] = Field(max_length=MAX_FILES)
    """One value for each requested path, in the order of the request. It says why the call cannot
    write or delete the path, and is null if the call can. For a deletion, a path that does not
    exist has the value `not_found`.
    """
    appended: Appended | None
    count: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)
    """Number of existing entries at or below those requested paths that have no fault."""
    size: int = Field(ge=0, le=strict_json.MAX_SAFE_INTEGER)
    """Total size in bytes of the entries that `count` counts."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A survey whose form has been checked: the state of all paths that a call reads or changes.
    `faults` says for each requested path why the call cannot write or delete it.
    """

    claim: SurveyClaim
    faults: Mapping[str, FaultKind | None]
    """Requested path → why the call cannot write or delete it, or None if the call can. The paths
    are in the order of the request. For a deletion, a path that does not exist has the fault
    `not_found`.
    """

    def at(self, path: str) -> Seen | None:
        """Return the entry for `path`, or None if the survey does not contain `path`."""
        return next((entry for entry in self.claim.entries if entry.path == path), None)

    @property
    def going(self) -> list[Seen]:
        """The entries that the call would delete: those that exist, and that are at or below a
        requested path for which `faults` names no fault.
        """
        tops = {path for path, fault in self.faults.items() if fault is None}
        return [
            entry
            for entry in self.claim.entries
            if entry.kind != "absent" and not tops.isdisjoint(_way(entry.path))
        ]


def _way(path: str) -> Iterator[str]:
    """Yield the path, then its parents, innermost first."""
    while path:
        yield path
        path = path.rpartition("/")[0]
