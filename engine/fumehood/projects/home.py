"""The record of a session's project directory. It is stored with the session."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePath

from fumehood.core.json_types import JsonObject

NAME = "project"
"""The name under which the record is stored with the session. The session's own record has a field
with the same name.
"""


@dataclass(frozen=True, slots=True)
class ProjectHome:
    """The directory of the host from which the files of a session were copied."""

    directory: str
    manifest: str = ""
    """The name, in the engine's file store, of the stored list of copied files."""
    manifest_bytes: int = 0

    @property
    def value(self) -> JsonObject:
        """The fields of this object as JSON, which is stored with the session. Future versions may
        add fields, but not change existing ones.
        """
        return asdict(self)


def shown(value: JsonObject) -> str:
    """Return the name of the project directory, without its path, for users. `value` is a stored
    `ProjectHome` (`ProjectHome.value`).
    """
    return PurePath(value["directory"]).name
