"""Convert an envelope to the result of `tools/call`: content for a model, and structured data.

Host side, used by `server.py`. A model reads the content: JSON without the bytes of files, figures
as images, and links to what is too large. A program reads `structuredContent`, the envelope's data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.returned_file import FILE_CONTENT, without_contents
from fumehood.mcp.messages import ENVELOPE_KEY

LINK_PREFIX = "fumehood://"
"""Makes a URI of a blob's address."""

FILE_LISTS = ("images", "files")


def result_of(envelope: Envelope) -> JsonObject:
    """The result that this envelope is."""
    document = envelope.model_dump(mode="json")
    data = document.pop("data")
    error = document["error"]
    shown = data if error is None else error.get("details") or {}
    text = _readable(data) if error is None else _failure(error, shown, document["metadata"])
    result: JsonObject = {
        "content": [{"type": "text", "text": text}, *_figures(shown), *_links(shown)],
        "isError": error is not None,
        "_meta": {ENVELOPE_KEY: document},
    }
    if error is None:
        result["structuredContent"] = data
    return result


def plain_result(data: JsonObject) -> JsonObject:
    """The result of a tool that is the server's own."""
    text = {"type": "text", "text": _readable(data)}
    return {"content": [text], "structuredContent": data, "isError": False}


def _readable(data: JsonObject) -> str:
    lists = {key: without_contents(data[key]) for key in FILE_LISTS if data.get(key)}
    return json.dumps({**data, **lists}, ensure_ascii=False)


def _failure(error: JsonObject, details: JsonObject, metadata: JsonObject) -> str:
    """Code and message, how to go on, and the program's own words."""
    parts = [f"{error['code']}: {error['message']}"]
    if error.get("approval_id") is not None:
        parts.append(f"Approval: {error['approval_id']}. Call: {metadata['call_id']}.")
    exception, stderr = details.get("exception"), details.get("stderr")
    words = {"stderr": stderr, "stdout": details.get("stdout")}
    traceback = exception.get("traceback") if isinstance(exception, dict) else None
    if isinstance(traceback, str) and traceback.strip() not in str(stderr):  # Python's is in both
        words = {"traceback": traceback, **words}
    parts += [f"{name}:\n{said}" for name, said in words.items() if said and isinstance(said, str)]
    return "\n".join(parts)


def _figures(shown: JsonObject) -> Iterator[JsonObject]:
    for item in _items(shown, "images"):
        content, kind = item.get(FILE_CONTENT), item.get("content_type")
        if isinstance(content, str) and isinstance(kind, str) and kind.startswith("image/"):
            yield {"type": "image", "data": content, "mimeType": kind}


def _links(shown: JsonObject) -> Iterator[JsonObject]:
    """Every blob that the answer names."""
    for name in FILE_LISTS:
        for item in _items(shown, name):
            yield from _link(item.get("url"), item.get("filename"), item.get("content_type"))
    notes = shown.get("truncation_info")
    for field in _items(notes, "fields") if isinstance(notes, dict) else ():
        yield from _link(field.get("resource_url"), field.get("field"), "text/plain")


def _link(url: Any, name: Any, media_type: Any) -> Iterator[JsonObject]:
    if isinstance(url, str) and isinstance(name, str):
        uri = LINK_PREFIX + url
        yield {"type": "resource_link", "uri": uri, "name": name, "mimeType": str(media_type)}


def _items(holder: JsonObject, name: str) -> Iterator[JsonObject]:
    listed = holder.get(name)
    return (
        (item for item in listed if isinstance(item, dict))
        if isinstance(listed, list)
        else iter(())
    )
