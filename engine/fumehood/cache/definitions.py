"""Checks the fields in a tool's definition that control caching."""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.core.json_types import JsonObject
from fumehood.registry.definitions import declared_in


def faults(document: JsonObject) -> Iterator[str]:
    """Yield a message for each fault in those fields of a tool's definition that control caching.
    `document` is the definition as JSON.
    """
    if document.get("cacheable") in (None, False):
        for field in ("cache_ttl", "cache_key_params"):
            if document.get(field) is not None:
                yield f"{field}: only for a tool that is cacheable"
        return
    if not document.get("read_only") and not document.get("idempotent"):
        yield "cacheable: only for a tool that is read_only or idempotent"
    if document.get("dangerous"):
        yield "cacheable: not for a dangerous tool, of which each call is decided by itself"
    if str(document.get("executor")).startswith(("workspace", "process")):
        yield "cacheable: not for a tool that runs in a session, whose files change"
    chosen = document.get("cache_key_params")
    if chosen == () or chosen == []:
        yield "cache_key_params: empty, so that all calls would share one answer; leave it out"
    known, _ = declared_in(document)
    for name in chosen if isinstance(chosen, list | tuple) else ():
        if isinstance(name, str) and name not in known:
            yield f"cache_key_params: there is no parameter {name[:64]!r}"
