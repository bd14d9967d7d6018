"""The text of a result that a model reads, within a number of characters.

Contents of files stay out of it: no model reads base64. Long texts are cut to both ends; the
envelope beside it, or the address in it, has the whole.
"""

from __future__ import annotations

import json
from typing import Any

from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import head_and_tail
from fumehood.core.returned_file import FILE_CONTENT, without_contents

SHORT_CHARACTERS = 64
"""Texts up to this length are names and codes, and stay whole."""


def result_text(envelope: Envelope, max_length: int) -> str:
    """What a model reads of a call: its data as JSON, or `CODE: message` and the details."""
    error = envelope.error
    if error is None:
        return fitted(envelope.data, max_length)
    head = f"{error.code}: {error.message}"
    known = error.model_dump(exclude={"code", "message", "retryable", "human_review"})
    if error.retryable:
        known["retryable"] = True
    if error.approval_id is not None:
        known["call_id"] = envelope.metadata.call_id
    if not known:
        return head_and_tail(head, max_length) if len(head) > max_length else head
    room = max_length - len(head) - 1
    return f"{head}\n{fitted(known, room)}" if room > SHORT_CHARACTERS else head[:max_length]


def fitted(data: JsonObject, max_length: int) -> str:
    """An object as JSON of at most `max_length` characters; without base64 in it."""
    lists = {key: _bare(data[key]) for key in ("images", "files") if data.get(key)}
    data = {**data, **lists}
    text = _dumps(data)
    if len(text) > max_length:  # a quarter for all that stands around the longest text
        text = _dumps(_cut(data, max(SHORT_CHARACTERS, max_length * 3 // 4)))
    return text if len(text) <= max_length else head_and_tail(text, max_length)


def _bare(listed: Any) -> Any:
    return [
        {key: said for key, said in item.items() if key != FILE_CONTENT}
        if isinstance(item, dict)
        else item
        for item in without_contents(listed)
    ]


def _dumps(data: JsonObject) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _cut(node: Any, limit: int) -> Any:
    if isinstance(node, str):
        return head_and_tail(node, limit) if len(node) > limit else node
    if isinstance(node, dict):
        return {
            key: said if key in ("url", "resource_url") else _cut(said, limit)
            for key, said in node.items()
        }
    return [_cut(item, limit) for item in node] if isinstance(node, list | tuple) else node
