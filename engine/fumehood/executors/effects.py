"""Effects: what a call would change, for the human who decides on it. Nothing is touched.

Host side, beside the executors; asked before an approval, and held to by `run_workspace` after it.
What the guest says is checked and bounded; a diff is made here. Invariants: `shown` is what `base`
and `effect` are hashes of; a call whose effect cannot be seen whole is refused, not guessed at.
Tools of other executors have no preview yet: one is a row in `_PREVIEWS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import anyio.to_thread

from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.effect_claims import Seen, Survey, SurveyClaim, line, read_survey
from fumehood.executors.effect_diff import text_of, unified
from fumehood.executors.workspace_claims import MAX_READ_BYTES, NotAsAgreed, Piece, fitting_piece
from fumehood.executors.workspace_guest import FAULT_WORDS, ask, not_as_agreed
from fumehood.executors.workspace_requests import content_of, delete_request, write_request
from fumehood.sandbox.wall import Lease

NEW_FILE_MODE = 0o644
NEW_DIRECTORY_MODE = 0o755
"""As the guest makes them."""

MAX_COMPARED_BYTES = MAX_READ_BYTES
"""Of each text of a diff: a file is read in one piece for it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effect:
    """What one call would change.

    `base` is the hash of everything that it looks at or changes, as it is now; `effect` of what
    it would be afterwards.
    """

    shown: JsonObject
    """`added`, `changed`, `removed`, `missing`, `kept`, `counts`, `truncated`, `would_fail`."""
    base: str
    effect: str


def has_preview(tool: ToolDefinition) -> bool:
    """Whether what a tool's calls would change can be told before."""
    return tool.executor in _PREVIEWS


async def effect_of(
    tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
) -> Effect | None:
    """What a call would change in the place that the lease is on; None for other executors.

    Raises:
        InvalidParams: too much to look at, or a file system that refuses to be looked at.
        SandboxUnavailable, Timeout, …: as the tool itself would, where the place cannot answer.
    """
    preview = _PREVIEWS.get(tool.executor)
    return None if preview is None else await preview(arguments, _Place(lease, limits))


@dataclass(frozen=True, slots=True)
class _Place:
    lease: Lease
    limits: Limits

    async def survey(self, request: JsonObject, paths: list[str]) -> Survey:
        said = await ask(self.lease, {"do": "survey", "of": request}, self.limits, SurveyClaim)
        try:
            return read_survey(said.required, paths)
        except NotAsAgreed:
            raise not_as_agreed() from None

    async def read(self, path: str, seen: Seen) -> bytes:
        """All of a small file, which is the one that was seen."""
        size = seen.size or 0
        request = {"do": "read", "path": path, "offset": 0, "length": MAX_COMPARED_BYTES}
        piece = (await ask(self.lease, request, self.limits, Piece)).required
        try:
            content = fitting_piece(piece, 0, MAX_COMPARED_BYTES)
        except NotAsAgreed:
            raise not_as_agreed() from None
        if len(content) != size or hashlib.sha256(content).hexdigest() != seen.sha256:
            raise not_as_agreed()
        return content


# -- write -------------------------------------------------------------------------------


async def _effect_of_write(arguments: JsonObject, place: _Place) -> Effect:
    path, content = arguments["path"], content_of(arguments)
    request = write_request(arguments)
    if request["mode"] != "append":
        request["content_base64"] = ""  # its hash is known here
    survey = await place.survey(request, [path])
    if survey.claim.has_more:
        raise InvalidParams(FAULT_WORDS["unseen"], fields=["path"], details={"fault": "unseen"})
    fault = survey.faults[path]
    if fault is not None:
        shown = _shown(would_fail=FAULT_WORDS[fault])
        return Effect(shown, survey.claim.base, _hash([{"path": path, "fault": fault}]))
    target = _agreed(survey.at(path))
    if target.kind == "absent":
        return await _effect_of_new_file(path, content, survey)
    if target.kind != "file" or request["mode"] == "create":
        raise not_as_agreed()
    return await _effect_of_change(request, content, target, survey, place)


async def _effect_of_new_file(path: str, content: bytes, survey: Survey) -> Effect:
    made = [
        {"path": one, "kind": "directory", "mode": NEW_DIRECTORY_MODE}
        for one in _lacking_above(path, survey)
    ]
    file = {"path": path, "kind": "file", "mode": NEW_FILE_MODE, **_figures(content)}
    added = [{**one, "mode": _mode(NEW_DIRECTORY_MODE)} for one in made]
    added.append({**file, "mode": _mode(NEW_FILE_MODE), **await _diff(b"", content)})
    return Effect(_shown(added=added), survey.claim.base, _hash([*made, file]))


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
        "before": {"mode": _mode(mode), "size": size, **_identity(target)},
        "after": {**after, "mode": _mode(after["mode"])},
    }
    if is_append and target.links not in (None, 1):
        changed["other_names"] = (target.links or 1) - 1
    if target.sha256 is None:
        changed["unread"] = True
    elif max(size, after["size"]) > MAX_COMPARED_BYTES:
        changed["too_large"] = True
    else:
        before = await place.read(path, target)
        whole = before + content if is_append else content
        if hashlib.sha256(whole).hexdigest() != after["sha256"]:
            raise not_as_agreed()
        changed |= await _diff(before, whole)
    effect = _hash([{"path": path, "kind": "file", **after}])
    return Effect(_shown(changed=[changed]), survey.claim.base, effect)


def _lacking_above(path: str, survey: Survey) -> list[str]:
    """The directories that would be made on the way, from the top."""
    parts = path.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts))]
    for number, one in enumerate(above):
        seen = survey.at(one)
        if seen is None or seen.kind == "absent":
            return above[number:]
    return []


async def _diff(before: bytes, after: bytes) -> JsonObject:
    """A diff, or why there is none. Made beside the event loop: the texts set its cost."""
    if max(len(before), len(after)) > MAX_COMPARED_BYTES:
        return {"too_large": True}
    old, new = text_of(before), text_of(after)
    if old is None or new is None:
        return {"binary": True}
    diff = await anyio.to_thread.run_sync(unified, old, new)
    marks = {"diff_truncated": diff.is_truncated, "diff_coarse": diff.is_coarse}
    return {"diff": diff.text, **{mark: True for mark, is_set in marks.items() if is_set}}


# -- delete ------------------------------------------------------------------------------


async def _effect_of_deletion(arguments: JsonObject, place: _Place) -> Effect:
    request = delete_request(arguments)
    survey = await place.survey(request, request["paths"])
    kept = {
        path: fault for path, fault in survey.faults.items() if fault not in (None, "not_found")
    }
    shown = _shown(
        removed=[_removed(entry) for entry in survey.going],
        missing=[path for path, fault in survey.faults.items() if fault == "not_found"],
        kept=[
            {"path": path, "why": FAULT_WORDS[fault or "invalid"]} for path, fault in kept.items()
        ],
        count=survey.claim.count,
        size=survey.claim.size,
        truncated=survey.claim.has_more,
        would_fail="Not all of it can be deleted; the rest would be." if kept else None,
    )
    afterwards: list[JsonObject] = [
        {"path": path, "fault": fault} if path in kept else {"path": path, "kind": "absent"}
        for path, fault in survey.faults.items()
    ]
    return Effect(shown, survey.claim.base, _hash(afterwards))


def _removed(entry: Seen) -> JsonObject:
    """One thing that would go, as it is shown."""
    shown = entry.model_dump(exclude_none=True, exclude={"version"})
    if entry.mode is not None:
        shown["mode"] = _mode(entry.mode)
    return {**shown, "unread": True} if entry.version is not None else shown


# -- both --------------------------------------------------------------------------------


def _shown(
    *,
    added: list[JsonObject] | None = None,
    changed: list[JsonObject] | None = None,
    removed: list[JsonObject] | None = None,
    missing: list[str] | None = None,
    kept: list[JsonObject] | None = None,
    count: int = 0,
    size: int = 0,
    truncated: bool = False,
    would_fail: str | None = None,
) -> JsonObject:
    """`count` and `size` are of all that would be removed, also where not all of it is shown."""
    shown: JsonObject = {
        "added": added or [],
        "changed": changed or [],
        "removed": removed or [],
        "missing": missing or [],
        "kept": kept or [],
        "counts": {
            "added": len(added or []),
            "changed": len(changed or []),
            "removed": count,
            "removed_bytes": size,
        },
        "truncated": truncated,
    }
    return shown if would_fail is None else {**shown, "would_fail": would_fail}


def _figures(content: bytes) -> JsonObject:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _identity(seen: Seen) -> JsonObject:
    return {} if seen.sha256 is None else {"sha256": seen.sha256}


def _mode(mode: int) -> str:
    return f"{mode:04o}"


def _agreed(value: T | None) -> T:
    """What has to be there. Raises SandboxUnavailable where it is not."""
    if value is None:
        raise not_as_agreed()
    return value


def _hash(manifest: list[JsonObject]) -> str:
    total = hashlib.sha256(b"fumehood.effect.1\n")
    for one in manifest:
        total.update(line(one))
    return total.hexdigest()


_PREVIEWS: Mapping[str, Callable[[JsonObject, _Place], Awaitable[Effect]]] = MappingProxyType(
    {"workspace:write": _effect_of_write, "workspace:delete": _effect_of_deletion}
)
"""Executors to what tells the effects of their calls."""
