"""What the operator chose for the container wall, and whose its containers are. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fumehood.core.languages import LANGUAGES
from fumehood.core.limits import CONTAINER_MEMORY_CLASSES, MB, WallLimits
from fumehood.sandbox.container.container import START_DEADLINE_S
from fumehood.sandbox.container.pool_entry import PoolRules
from fumehood.sandbox.container.spec import GUEST_COMMAND

CONTAINER_LIMITS = WallLimits(
    default_wall_s=30,
    max_wall_s=600,
    default_memory_mb=512,
    max_memory_mb=2048,
    min_memory_mb=CONTAINER_MEMORY_CLASSES[0],
    output_bytes=MB,
    memory_classes=CONTAINER_MEMORY_CLASSES,
)


IMAGES: Mapping[str, str] = MappingProxyType(
    {language.name: language.image for language in LANGUAGES.values()}
)


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """What the operator chose."""

    limits: WallLimits = CONTAINER_LIMITS
    rules: PoolRules = field(default_factory=PoolRules)
    images: Mapping[str, str] = field(default_factory=lambda: IMAGES)
    """By language. The first one stands ready for whoever comes."""
    held_s: float = 0.0
    """How long a session has a container at most."""
    runtime: str | None = None
    cpus: float = 1.0
    command: tuple[str, ...] = GUEST_COMMAND
    start_deadline_s: float = START_DEADLINE_S


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Whose containers they are. `owner_id` is the same after a restart of the engine."""

    engine_id: str
    owner_id: str
