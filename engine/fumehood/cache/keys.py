"""The keys of answers: SHA-256 over the canonical JSON of everything that decides a result.

Host side. A canonical form takes longer than all the rest of a hit, so the keys of short calls are
remembered by the exact text of their arguments, in which 1, 1.0 and true differ.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic_core import to_json

from fumehood.core.call import CallOptions
from fumehood.core.json_types import JsonObject
from fumehood.protocol.canonical import digest_of
from fumehood.registry.index import RegisteredTool

MAX_ARGUMENT_BYTES = 64 * 1024
"""Hashing takes about 5 ms for so much, on the event loop; calls with more are not cached."""

MAX_REMEMBERED = 2048
"""Keys, and digests of definitions."""

MAX_REMEMBERED_BYTES = 2048
"""Size of the largest arguments whose key is remembered."""


class CacheKeys:
    """The keys of one engine. `digest_of_tool` is the hash of a definition and its code."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}
        self._digests: dict[int, tuple[RegisteredTool, str]] = {}
        """By the identity of a tool that is kept with it, so that no other one gets its number."""

    def key(
        self,
        tool: RegisteredTool,
        digest_of_tool: Callable[[RegisteredTool], str],
        arguments: JsonObject,
        principal_id: str,
        options: CallOptions,
    ) -> str | None:
        """The key of a call's answer; None if the arguments are too long or have no canonical
        form, so that no two calls are known to be equal."""
        try:
            text = to_json(arguments)
        except ValueError:
            return None
        if len(text) > MAX_ARGUMENT_BYTES:
            return None
        definition = self._digest(tool, digest_of_tool)
        call = (
            definition, text, principal_id, options.agent_id, options.return_summary,
            options.max_length,
        )  # fmt: skip
        known = self._known.get(call)
        if known is not None:
            return known
        document: JsonObject = {
            "tool": tool.definition.name,
            "version": tool.definition.version,
            "definition": definition,
            "arguments": arguments,
            "principal": principal_id,
            "agent": options.agent_id,
            "return_summary": options.return_summary,
            "max_length": options.max_length,
        }
        try:
            key = digest_of(document)
        except ValueError:
            return None
        if len(text) <= MAX_REMEMBERED_BYTES:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[call] = key
        return key

    def _digest(self, tool: RegisteredTool, make: Callable[[RegisteredTool], str]) -> str:
        """The digest of a tool, made once for each registration."""
        found = self._digests.get(id(tool))
        if found is not None:
            return found[1]
        if len(self._digests) >= MAX_REMEMBERED:
            self._digests.clear()
        digest = make(tool)
        self._digests[id(tool)] = tool, digest
        return digest
