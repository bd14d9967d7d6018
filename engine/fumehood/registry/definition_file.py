"""One file of definitions: from its bytes to documents, or to the one reason why not.

Host side, asked by `directory`; the formats are read in `protocol/files`.
"""

from __future__ import annotations

from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.protocol.files import SUFFIXES, FileFault, one_line, read_values

MAX_DEFINITIONS = 10_000
"""Definitions of one file, and of a directory in all."""


def read_documents(name: str, data: bytes) -> list[JsonObject]:
    """The documents in a file, by the format that its name says.

    Raises:
        FileFault: not in that format, or not definitions.
    """
    return _documents(read_values(name, data))


def _documents(value: Any) -> list[JsonObject]:
    if isinstance(value, dict) and "tools" in value:
        others = sorted(value.keys() - {"tools"})
        if others:
            raise FileFault(f"beside 'tools' there is {others[0][:40]!a}")
        value = value["tools"]
        if not isinstance(value, list):
            raise FileFault("'tools' is not a list of definitions")
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MAX_DEFINITIONS:
        raise FileFault(f"it holds {len(listed)} tools; at most {MAX_DEFINITIONS} are read in all")
    if not all(isinstance(item, dict) for item in listed):
        raise FileFault("neither a definition, nor a list of definitions, nor {'tools': [...]}")
    return listed


__all__ = ["MAX_DEFINITIONS", "SUFFIXES", "FileFault", "one_line", "read_documents"]
