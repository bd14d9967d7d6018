"""The record of a session's project directory, which is kept with the session."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePath

from fumehood.core.json_types import JsonObject

NAME = "project"
"""Name of the value that is kept with the session, and of the field in the session's record."""


@dataclass(frozen=True, slots=True)
class ProjectHome:
    """The project directory from which a session's files were copied."""

    directory: str
    manifest: str = ""
    """The name of the stored list of copied files in the engine's file store."""
    manifest_bytes: int = 0

    @property
    def value(self) -> JsonObject:
        """The value that is kept with the session. Future versions may add fields to it, but not
        change it.
        """
        return asdict(self)


def shown(value: JsonObject) -> str:
    """Return what the session's record shows about the project: the name of the directory, without
    its path.
    """
    return PurePath(value["directory"]).name
