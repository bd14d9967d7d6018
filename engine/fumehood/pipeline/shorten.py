"""Shorten: what is too long for an envelope is kept whole elsewhere; head and tail stay.

Between `shape` and `account` (mission E6), for every tool, in `data` and in `error.details`.
Each long text becomes a blob of the caller's; `truncated`, `truncation_info` and
`resource_url` say so beside what is left. Contents of files are not text (E7) and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anyio

from fumehood.core.json_types import JsonObject
from fumehood.core.returned_file import FILE_CONTENT
from fumehood.executors.outcome import CutText
from fumehood.observe.clock import timestamp
from fumehood.pipeline.shape import ShapedOutcome
from fumehood.protocol import strict_json
from fumehood.storage.blobs import BlobStore, NotKept

INLINE_BYTES = 10 * 1024
"""Of one text, in UTF-8 (mission E6)."""

SIDE_BYTES = 5000
"""What stays of either end; the words between them fit in the rest."""

PLAIN_TEXT = "text/plain; charset=utf-8"
MAX_FIELDS = 200
"""Texts of one answer that are kept; further ones are shortened only."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Long:
    """One value that is too long: where it stands, and what was in its place."""

    path: Path
    whole: str
    shown: str | None
    content_type: str
    length: int
    """Characters of the whole, which is not here where it is kept already."""

    @property
    def name(self) -> str:
        """Its place in dots."""
        return ".".join(map(str, self.path))[:200]


async def shorten(
    shaped: ShapedOutcome,
    *,
    blobs: BlobStore,
    principal_id: str | None,
    with_value: bool = False,
    with_summary: bool = True,
) -> ShapedOutcome:
    """The outcome as an envelope shows it. Without a principal nothing is kept.

    `with_value` counts a long `value` of any type, too; it is left out whole.
    """
    error = shaped.outcome.error
    cuts = shaped.outcome.cuts
    if error is None and not cuts and 0 < len(shaped.text) <= INLINE_BYTES:
        return shaped  # all of it together is short enough: JSON is no shorter than its texts
    target = shaped.data if error is None else error.details
    if not target:
        return shaped
    kept = shaped.outcome.whole_fields
    found = [
        long
        for long in _long_values(target, with_value=with_value)
        if len(long.path) > 1 or long.path[0] not in kept
    ]
    if not found and not cuts:
        return shaped
    with anyio.CancelScope(shield=True):  # bounded by the disk; the tool has acted by now
        links = [await _link(long, blobs, principal_id) for long in found[:MAX_FIELDS]]
    links += [{} for _ in found[MAX_FIELDS:]]
    found = [_long_of(cut) for cut in cuts] + found
    links = [cut.link for cut in cuts] + links
    short = _put(target, {long.path: long.shown for long in found})
    short |= _note(found, links, with_summary=with_summary)
    if error is not None:
        return ShapedOutcome(shaped.outcome, shaped.data, shaped.text, details=short)
    return ShapedOutcome(shaped.outcome, short, strict_json.dumps(short).decode())


def shortened(data: JsonObject) -> JsonObject:
    """The same with long texts cut, where the whole is not lost: the caller has it."""
    found = {long.path: long.shown for long in _long_values(data, with_value=False)}
    short: JsonObject = _put(data, found) if found else data
    return short


def head_and_tail(text: str) -> str:
    """Both ends of a text that is too long, and between them how much is missing."""
    return _ends(text[:SIDE_BYTES], text[-SIDE_BYTES:], len(text))


def _ends(head: str, tail: str, length: int) -> str:
    head = head.encode("utf-8", "replace")[:SIDE_BYTES].decode("utf-8", "ignore")
    tail = tail.encode("utf-8", "replace")[-SIDE_BYTES:].decode("utf-8", "ignore")
    missing = length - len(head) - len(tail)
    return f"{head}\n… {missing} characters left out …\n{tail}"


def _long_values(target: JsonObject, *, with_value: bool) -> Iterator[_Long]:
    """Every long text, in order; depth is bounded by `shape`."""
    for path, value in _walk(target, ()):
        if isinstance(value, str) and _is_long(value):
            yield _Long(path, value, head_and_tail(value), PLAIN_TEXT, len(value))
    value = target.get("value")
    if with_value and isinstance(value, dict | list):
        text = strict_json.dumps(value).decode()
        if _is_long(text):
            yield _Long(("value",), text, None, "application/json", len(text))


def _long_of(cut: CutText) -> _Long:
    """What was too long for memory, and is kept by now."""
    return _Long((cut.field,), "", _ends(cut.head, cut.tail, cut.length), PLAIN_TEXT, cut.length)


def _walk(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    items: Any = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    for key, value in items:
        if key == FILE_CONTENT and "filename" in node:
            continue
        if isinstance(value, str):
            yield (*path, key), value
        elif isinstance(value, dict | list | tuple):
            yield from _walk(value, (*path, key))


def _is_long(text: str) -> bool:
    if len(text) * 4 <= INLINE_BYTES:  # no character has more bytes
        return False
    return len(text) > INLINE_BYTES or len(text.encode("utf-8", "replace")) > INLINE_BYTES


async def _link(long: _Long, blobs: BlobStore, principal_id: str | None) -> JsonObject:
    if principal_id is None:
        return {}
    draft = blobs.draft(principal_id)
    draft.feed(long.whole.encode("utf-8", "replace"))
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in long.name)
    suffix = ".json" if long.content_type == "application/json" else ".txt"
    try:
        blob = await blobs.keep(draft, name + suffix, long.content_type)
    except NotKept as reason:
        return {"not_kept": f"{reason}, so the rest is lost"}
    return {"resource_url": blob.url, "expires_at": timestamp(blob.expires_at)}


def _put(target: Any, values: dict[Path, str | None], path: Path = ()) -> Any:
    """A copy with other values at these places."""
    if path in values:
        return values[path]
    if isinstance(target, dict):
        return {key: _put(value, values, (*path, key)) for key, value in target.items()}
    if isinstance(target, list | tuple):
        return [_put(value, values, (*path, index)) for index, value in enumerate(target)]
    return target


def _note(found: list[_Long], links: list[JsonObject], *, with_summary: bool) -> JsonObject:
    """What stands beside shortened values. The first one's link is the answer's."""
    fields = [
        {
            "field": long.name,
            "original_length": long.length,
            "returned_length": len(long.shown or ""),
            **link,
        }
        for long, link in zip(found, links, strict=True)
    ]
    note: JsonObject = {
        "truncated": True,
        "truncation_info": {
            "original_length": sum(field["original_length"] for field in fields),
            "returned_length": sum(field["returned_length"] for field in fields),
            "summary": _summary(found) if with_summary else None,
            "fields": fields,
        },
    }
    url = next((link["resource_url"] for link in links if "resource_url" in link), None)
    return note if url is None else {**note, "resource_url": url}


def _summary(found: list[_Long]) -> str:
    words = [
        f"{long.name} has {long.length} characters, "
        + ("of which both ends are here" if long.shown is not None else "and is left out")
        for long in found[:5]
    ]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(words) + more + "."
