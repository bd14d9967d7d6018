"""The value that is kept with a session whose files came from a project directory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePath

from fumehood.core.json_types import JsonObject

NAME = "project"
"""Name of the value, and of the field in the session's record."""


@dataclass(frozen=True, slots=True)
class ProjectHome:
    """The project directory from which a session's files were copied."""

    directory: str
    manifest: str = ""
    """The name, in the engine's file store, of the list of copied files."""
    manifest_bytes: int = 0

    @property
    def value(self) -> JsonObject:
        """The value that is kept with the session. Its form may only be extended."""
        return asdict(self)


def shown(value: JsonObject) -> str:
    """Return what the session's record shows: the directory's name without its path."""
    return PurePath(value["directory"]).name
