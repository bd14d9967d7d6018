"""The operator's settings for walls, containers and sessions, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fumehood.core.limits import (
    CONTAINER_MEMORY_CLASSES,
    MAX_CPUS,
    MAX_DISK_MB,
    MIN_CPUS,
    MIN_DISK_MB,
    MIN_JAIL_MB,
    Grade,
    WallLimits,
)
from fumehood.core.names import IMAGE_NAME
from fumehood.core.part import PartError
from fumehood.core.session import PresetName, SessionFields
from fumehood.parts import AUTO, container_part, missing_options

if TYPE_CHECKING:
    from fumehood.sandbox.container.additions import NewImageMaker
    from fumehood.sandbox.container.runtime import NewRuntime

GUEST_MB = 32
"""Memory of the guest, in MB, in an image without preloaded modules. A container has it in addition
to the program's memory.
"""

MIN_MB, MAX_MB = CONTAINER_MEMORY_CLASSES[0], CONTAINER_MEMORY_CLASSES[-1]

ImageName = Annotated[str, Field(pattern=IMAGE_NAME)]


class SessionSettings(BaseModel):
    """Defaults and maximums for sessions, and limits on the number of sessions. A default applies
    if a request gives no value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: ImageName = "python-data"
    max_disk_mb: int = Field(default=10_240, ge=MIN_DISK_MB, le=MAX_DISK_MB)
    """Maximum size of the disk that can be requested for a session."""
    max_disks: int = Field(default=100, ge=0, le=10_000)
    """Maximum number of sessions with a disk, including stopped ones. One principal may have half
    of this number.
    """
    max_saved_mb: int = Field(default=20_480, ge=0, le=10_000_000)
    """Maximum total size of all durable sessions' workspaces, in MB. The workspaces of one
    principal may have half of this size.
    """
    disk_lifetime_seconds: float = Field(default=604_800, ge=10, le=31_536_000)
    """Both the default and the maximum lifetime of a session with a disk."""
    max: int = Field(default=32, ge=0, le=256)
    """Maximum number of sessions that are not stopped. In addition, all of them together may
    reserve at most three quarters of the host's memory, and one principal's sessions at most three
    quarters of that amount.
    """
    max_per_principal: int = Field(default=16, ge=0, le=256)
    max_memory_mb: int | None = Field(default=None, ge=MIN_MB, le=MAX_MB)
    """Maximum memory that can be requested for a session, in MB. None means a quarter of the host's
    memory, but at least the maximum for a call.
    """
    max_cpus: float | None = Field(default=None, ge=MIN_CPUS, le=MAX_CPUS)
    """Maximum number of processors that can be requested for a session. None means all processors
    of the host.
    """
    idle_seconds: float = Field(default=1800, ge=1, le=86_400)
    """Seconds without a call after which a session ends or, if it has a disk, is stopped. This is
    both the default and the maximum that a caller may request.
    """
    pause_seconds: float = Field(default=60, ge=1, le=86_400)
    """Seconds without a call after which a session's processes are frozen until the next call."""
    lifetime_seconds: float = Field(default=14_400, ge=10, le=604_800)
    queue_seconds: float = Field(default=30, ge=0, le=600)
    """Maximum seconds that a call waits for earlier calls in the same session."""
    waiting: int = Field(default=20, ge=0, le=1000)
    """Maximum number of calls that wait for one session."""
    orphan_seconds: float = Field(default=600, ge=0, le=86_400)
    """Seconds for which a session's container waits for the next engine after a restart or a
    crash.
    """

    @property
    def max_of_one(self) -> int:
        """Maximum number of sessions of one principal that are not stopped. This is never above the
        maximum for all principals.
        """
        return min(self.max_per_principal, self.max)


class Preset(SessionFields):
    """Properties of sessions that the operator has set under a name. They are the defaults for a
    request that names the preset.
    """

    model_config = ConfigDict(strict=False)

    image: ImageName | None = None


AllPresets = dict[PresetName, Preset]
"""Name of a preset → preset."""


def require_presets_within(presets: Mapping[str, Preset], sessions: SessionSettings) -> None:
    """Check that each preset's values are within the limits of `sessions`, and that a part of this
    engine implements each option that a preset sets. Limits that depend on the host are checked
    when a session is created.

    Raises:
        ValueError: a value is outside its limits, or no part implements an option. The message
            names the key of this value or option.
    """
    for name, preset in presets.items():
        for key in missing_options(preset):
            raise ValueError(f"{name}.{key} is provided by no part of this engine")
        lifetime = "lifetime_seconds" if preset.disk_mb is None else "disk_lifetime_seconds"
        for key, least, setting, most in (
            ("memory_mb", MIN_MB, "max_memory_mb", MAX_MB),
            ("disk_mb", MIN_DISK_MB, "max_disk_mb", MAX_DISK_MB),
            ("cpus", MIN_CPUS, "max_cpus", MAX_CPUS),
            ("idle_seconds", 0, "idle_seconds", 0),
            ("lifetime_seconds", 0, lifetime, 0),
        ):
            wish, most = getattr(preset, key), getattr(sessions, setting) or most
            if wish is not None and not least <= wish <= most:
                raise ValueError(
                    f"{name}.{key} must be from {least:g} to {most:g}, by sessions.{setting}"
                )


class ProcessWallSettings(BaseModel):
    """Defaults and maximums for calls behind one process wall."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_memory_mb: ClassVar[int]

    timeout_seconds: float = Field(default=30, gt=0, le=600)
    max_timeout_seconds: float = Field(default=600, gt=0, le=600)
    cpu_seconds: float | None = Field(default=None, gt=0)
    """Maximum CPU seconds of one call. None means that only wall time limits CPU time."""
    memory_mb: int
    max_memory_mb: int
    output_kb: int = Field(default=1024, ge=1, le=1024)

    @property
    def limits(self) -> WallLimits:
        """The limits of calls behind this wall."""
        return WallLimits(
            default_wall_s=self.timeout_seconds,
            max_wall_s=self.max_timeout_seconds,
            default_memory_mb=self.memory_mb,
            max_memory_mb=self.max_memory_mb,
            min_memory_mb=self.min_memory_mb,
            output_bytes=self.output_kb * 1024,
            cpu_s=self.cpu_seconds,
        )


class JailSettings(ProcessWallSettings):
    """Defaults and maximums for the jail, which runs sandboxed functions."""

    min_memory_mb: ClassVar[int] = MIN_JAIL_MB

    memory_mb: int = Field(default=256, ge=MIN_JAIL_MB)
    max_memory_mb: int = Field(default=2048, ge=MIN_JAIL_MB)


class LanguageImages(BaseModel):
    """The image for the programs of each language, in calls that use no session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: ImageName = "python-data"
    """The image for Python programs. Also the image of the containers that are kept ready."""
    shell: ImageName = "shell"
    javascript: ImageName = "node"


class ContainerSettings(BaseModel):
    """Defaults and maximums for the container wall, and limits on the number of containers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = AUTO
    """What runs the containers: `docker`, `direct`, `gvisor` or `landlock`. `auto` is Docker if
    this user has it, and otherwise the first of the others, in this order, that this host can run.
    """
    images: LanguageImages = LanguageImages()
    runtime: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the OCI runtime. None means Docker's default runtime."""
    least_grade: Grade = Grade.NAMESPACES
    """The weakest grade of containers that is used. With `watched`, programs also run on a host
    that does not limit memory and CPU time, where the guest watches them. With `process`, they run
    also on a host that gives no namespaces.
    """
    timeout_seconds: float = Field(default=30, gt=0, le=600)
    max_timeout_seconds: float = Field(default=600, gt=0, le=600)
    cpu_seconds: float | None = Field(default=None, gt=0)
    """Maximum CPU seconds of one call. None means that only wall time and `cpus` limit CPU time."""
    cpus: float = Field(default=1, ge=MIN_CPUS, le=MAX_CPUS)
    memory_mb: int = Field(default=512, ge=MIN_MB, le=MAX_MB)
    """Default memory of a call, in MB. It is rounded down to a value of `CONTAINER_MEMORY_CLASSES`,
    like `max_memory_mb`.
    """
    max_memory_mb: int = Field(default=2048, ge=MIN_MB, le=MAX_MB)
    output_kb: int = Field(default=1024, ge=1, le=1024 * 1024)
    pool_min: int = Field(default=1, ge=0, le=256)
    """Number of unused containers that are kept ready for any caller."""
    pool_max: int = Field(default=8, ge=1, le=256)
    max_uses: int = Field(default=1000, ge=1, le=1_000_000)
    """Number of calls after which a container is removed."""
    idle_seconds: float = Field(default=300, ge=1, le=86_400)
    """Seconds for which an idle container is kept for the trust domain that has used it."""
    lifetime_seconds: float = Field(default=3600, ge=10, le=86_400)
    queue_seconds: float = Field(default=30, ge=0, le=600)
    """Maximum seconds that a call waits for a container."""

    @field_validator("engine")
    @classmethod
    def _is_of_a_part(cls, engine: str) -> str:
        try:
            if engine != AUTO:  # which fits every host
                container_part(engine)
        except PartError as error:
            raise ValueError(str(error)) from None
        return engine

    @model_validator(mode="after")
    def _warm_ones_fit(self) -> Self:
        if self.pool_min > self.pool_max:
            raise ValueError("pool_min is more than pool_max")
        return self

    @property
    def limits(self) -> WallLimits:
        """The limits of calls in containers."""
        return WallLimits(
            default_wall_s=self.timeout_seconds,
            max_wall_s=self.max_timeout_seconds,
            default_memory_mb=self.memory_mb,
            max_memory_mb=self.max_memory_mb,
            min_memory_mb=MIN_MB,
            output_bytes=self.output_kb * 1024,
            cpu_s=self.cpu_seconds,
            memory_classes=CONTAINER_MEMORY_CLASSES,
        )

    @property
    def warm_memory_mb(self) -> int:
        """The memory, in MB, of the containers that are kept ready. It is one of the fixed memory
        sizes of containers.
        """
        return self.limits.memory_class(min(self.memory_mb, self.max_memory_mb))


@dataclass(frozen=True, slots=True)
class WallSettings:
    """The settings of all walls of one engine. All times are in seconds.

    `own_images` is the folder of the operator's own image recipes, the files from which images are
    built. `longest_session_s` is the maximum lifetime of a session without a disk, and
    `longest_with_disk_s` the maximum lifetime of a session with a disk. If the engine ends, a
    session's container waits for the next engine for `orphan_s`.
    """

    jail: JailSettings
    container: ContainerSettings
    own_images: Path
    longest_session_s: float
    longest_with_disk_s: float
    orphan_s: float
    part_of_one: float = 0.75
    """The fraction of all containers, rounded up, that one principal's calls may use. On a node,
    the fraction is 1, because the engine divides the slots of nodes.
    """
    runtime: NewRuntime | None = None
    """Creates what runs the containers. None if nothing does."""
    image_maker: NewImageMaker | None = None
    """Creates the object that adds packages and the like to images. None if nothing can be added to
    images.
    """


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The identity of an engine. The engine recognizes its containers by it.

    `engine_id` is new at each start of an engine. All engines with the same state directory have
    the same `owner_id`.
    """

    engine_id: str
    owner_id: str
