"""Sessions as their owner sees them, and their workspaces: files and variables that outlive a call.

Values only. `sandbox/sessions` holds the live sessions, `storage/sessions` their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from fumehood.core.arguments import MAX_VARIABLES, VariableName, Word
from fumehood.core.call import Id, Packages
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import (
    CONTAINER_MEMORY_CLASSES,
    MAX_CPUS,
    MAX_DISK_MB,
    MIN_CONTAINER_MB,
    MIN_CPUS,
    MIN_DISK_MB,
    Grade,
)
from fumehood.core.names import IMAGE_NAME
from fumehood.core.tool import LeastGrade, Megabytes, NetworkPatterns, Seconds
from fumehood.core.value import StrictValue, Value

MAKING_S = 300.0
"""Maximum seconds for creating a session, including package installation and the wait for a
container."""

TURN_S = 60.0
"""Maximum seconds for a request to a session, including its wait while the session is busy."""


SESSION_NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"
"""Pattern of a session's name. Names have no underscore, so that they differ from ids."""

PresetName = Annotated[str, Field(pattern=SESSION_NAME)]

MAX_ENV_BYTES = 64 * 1024
"""Maximum bytes of all environment variables of a session together. The variables are stored with
the session, and a call may add `arguments.MAX_WORDS_BYTES` of its own.
"""


def _require_small(env: dict[str, str]) -> dict[str, str]:
    if sum(len(name) + len(value.encode()) for name, value in env.items()) > MAX_ENV_BYTES:
        raise ValueError(f"has more than {MAX_ENV_BYTES} bytes together")
    return env


Variables = Annotated[
    dict[VariableName, Word],
    Field(
        max_length=MAX_VARIABLES,
        description="Environment variables of all programs in the session. A call's argument `env` "
        "takes precedence. Answers contain only the names of the variables.",
    ),
    AfterValidator(_require_small),
]
"""Maps the name of each environment variable to its value."""


class SessionStatus(StrEnum):
    """The state of a session."""

    ACTIVE = "active"
    PAUSED = "paused"
    """The session's processes are frozen until its next use: they take memory but no CPU."""
    STOPPED = "stopped"
    """The session has only its disk or a copy of its files. Its next use starts a container."""
    ENDED = "ended"
    """The session was ended by its owner, at the end of its lifetime, or together with an engine
    that keeps nothing on disk.
    """
    LOST = "lost"
    """The container was lost, together with the session's files and variables."""

    @property
    def is_over(self) -> bool:
        """Whether the session has ended or was lost. It then has no files and cannot be used."""
        return self in (SessionStatus.ENDED, SessionStatus.LOST)


class _Record(BaseModel):
    """A value that the engine sends. Unknown fields, which a later engine may send, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Snapshot(_Record):
    """A copy of a session's files at one time."""

    id: str
    name: str | None
    bytes: int
    """Bytes that the snapshot takes on the host's disk."""
    created_at: AwareDatetime


class SessionRecord(_Record):
    """One session.

    `why` is a sentence that says why the session ended, was lost or was stopped; otherwise null.
    """

    id: str
    name: str | None = None
    """The name that the owner chose, unique among the owner's sessions that have not ended. An
    ended session keeps its name until another session has it.
    """
    state: SessionStatus
    why: str | None
    image: str
    languages: tuple[str, ...]
    agent_id: str | None
    memory_mb: int
    disk_mb: int | None = None
    """Size of the session's disk, or None if the files are in memory."""
    cpus: float | None = None
    """Number of processors, or None if there are as many as for a call without a session."""
    least_grade: Grade | None = None
    """The weakest grade of a container in which the session may run, or None for the engine's."""
    packages: tuple[str, ...] = ()
    """The packages that were added to the image, as NAME==VERSION."""
    created_at: AwareDatetime
    last_used_at: AwareDatetime
    expires_at: AwareDatetime
    """When the session ends if it stays unused, at the latest at the end of its lifetime. If the
    session is over: when it ended or was lost.
    """
    calls: int
    is_busy: bool
    """Whether a call is running in the session or waiting for it."""
    snapshots: tuple[Snapshot, ...] = ()
    """Copies of the session's files, oldest first."""
    network: tuple[str, ...] = ()
    """Hosts that the session's programs may reach, in addition to hosts that a call requests."""
    durable: bool = False
    """Whether the files are saved after each call, and restored if the container is lost."""
    saved_at: AwareDatetime | None = None
    """When the files were last saved, if the session is durable."""
    restored_at: AwareDatetime | None = None
    """When the files were last restored."""
    env: tuple[str, ...] = ()
    """The names of the environment variables of the session's programs."""
    preset: str | None = None
    """The preset with which the session was created."""
    project: str | None = None
    """The name of the project directory from which the files were copied."""


class OwnedSession(SessionRecord):
    """A session with its owner."""

    principal_id: str


@dataclass(frozen=True, slots=True)
class SavedCopy:
    """The copy of a durable session's files in the engine's file store. `manifest` names the list
    of the copy's contents. If `manifest` is empty, no files have been saved.
    """

    saved_at: str
    manifest: str = ""
    """The manifest's name in the engine's file store."""
    manifest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionHome:
    """What an engine stores about an active session, in order to continue it later. The session is
    continued by the same engine after a restart, or by another engine after a failover.
    """

    container: str
    epoch: int
    """The epoch of the last engine that controlled the container. The next engine gets a higher
    epoch."""
    idle_s: float
    lifetime_s: float
    lock: str = ""
    """The packages that were added to the image, with hashes."""
    node: str = ""
    """The id of the node with the container, if the engine has nodes."""
    copy: SavedCopy | None = None
    """The session's saved files, if it is durable."""
    restored_at: str | None = None
    must_restore: bool = False
    """Whether the next engine must restore the files from the saved copy, because those in the
    container are incomplete, or have changes that nobody has approved."""
    of_parts: Mapping[str, JsonObject] = field(default_factory=dict, repr=False)
    """The values that parts keep with the session, by name. They may hold secrets."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment variables of the session's programs. The values may be secret."""


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A stored session with its owner."""

    principal_id: str
    record: SessionRecord
    finished_at: datetime | None = None
    """When the session ended or was lost."""
    home: SessionHome | None = None
    """What the next engine needs to continue the session, or None once the session has ended."""


class SessionFields(StrictValue):
    """The properties of a new session. Absent fields have the configured defaults."""

    image: str | None = Field(
        default=None, min_length=1, max_length=64, json_schema_extra={"pattern": IMAGE_NAME}
    )
    memory_mb: Megabytes | None = Field(
        default=None,
        description="At most the setting `sessions.max_memory_mb`.",
        json_schema_extra={"minimum": MIN_CONTAINER_MB, "maximum": CONTAINER_MEMORY_CLASSES[-1]},
    )
    cpus: float | None = Field(
        default=None,
        ge=MIN_CPUS,
        le=MAX_CPUS,
        description="Processors for the session's programs, at most the setting "
        "`sessions.max_cpus`.",
    )
    disk_mb: Megabytes | None = Field(
        default=None,
        description="Size of a disk for the session's files, at most the setting "
        "`sessions.max_disk_mb`. Files on the disk can be executed. By default, the files are in "
        "memory.",
        json_schema_extra={"minimum": MIN_DISK_MB, "maximum": MAX_DISK_MB},
    )
    least_grade: LeastGrade | None = None
    packages: Packages | None = None
    network: NetworkPatterns = ()
    env: Variables = Field(default_factory=dict, repr=False)
    durable: bool = Field(
        default=False,
        description="Save the session's files after each call, and restore them if the session's "
        "container or node is lost.",
    )
    idle_seconds: Seconds | None = Field(
        default=None, description="At most the setting `sessions.idle_seconds`."
    )
    lifetime_seconds: Seconds | None = Field(
        default=None, description="At most the setting `sessions.lifetime_seconds`."
    )


class NewSession(SessionFields):
    """The body of `POST /v1/sessions`."""

    name: str | None = Field(
        default=None,
        pattern=SESSION_NAME,
        description="A name for the session, which can be used everywhere instead of its id.",
    )
    agent_id: Id | None = None
    preset: PresetName | None = Field(
        default=None,
        description="The name of a configured preset. The preset's fields are the defaults of the "
        "other fields here; `network` and `env` are added to those of the preset.",
    )


class Project(_Record):
    """A claimed directory, whose files can be copied into new sessions."""

    id: str
    """The id by which a new session refers to the project. It is valid while the engine runs."""
    directory: str
    proof: str
    """The name of an empty file that must be created in the directory first, or an empty string."""


FileKind = Literal["file", "image"]
"""A file that a program wrote, or an image of a figure that it drew."""

SessionState = Literal["kept", "rolled_back", "reset", "restarted", "restored"]
"""The state of a session's variables after a run. `kept`: as the run left them. `rolled_back`:
restored to their state before the run. `reset`: lost. `restarted` and `restored`: the session has
only the variables of this run, because before this run the session had been stopped or its
container had been lost. Files stay as they are, except that `restored` also sets them back to the
last saved copy.
"""

EntryKind = Literal["file", "directory", "link", "other"]
"""`other` is a pipe, a socket or a device, which is never read or written from outside."""

UPLOAD_PIECE_BYTES = 1 << 20
"""Size of one piece of an upload into a session."""


class WorkspaceEntry(Value):
    """One entry of a workspace: a file, a directory, a link, or `other`, such as a pipe."""

    path: str = Field(description="Path relative to the workspace.")
    kind: EntryKind
    size: int = Field(description="Size in bytes.")
    modified_at: str = Field(description="Modification time, which the session's programs can set.")
