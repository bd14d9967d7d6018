"""What somebody wants of a new session, within what the operator allows. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fumehood.core.errors import InvalidParams
from fumehood.core.limits import WallLimits
from fumehood.core.session import SessionRules

IMAGE_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
MAX_WORD_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What it gets."""

    image: str
    memory_mb: int
    idle_s: float
    lifetime_s: float


def make_wishes(
    rules: SessionRules,
    offered: WallLimits,
    *,
    image: str | None,
    memory_mb: int | None,
    idle_s: float | None,
    lifetime_s: float | None,
) -> SessionRequest:
    """Absent is as configured; a size is rounded down to one that there is.

    Raises:
        InvalidParams: a wish is over what was configured, or is none.
    """
    chosen = rules.image if image is None else image
    if not IMAGE_NAME.fullmatch(chosen):
        shown = chosen[:MAX_WORD_CHARACTERS]
        raise InvalidParams(
            f"{shown!r} cannot be the name of an image. fumehood images list shows those that "
            "there are.",
            fields=["image"],
        )
    lifetime = _seconds("lifetime_seconds", lifetime_s, rules.lifetime_s)
    return SessionRequest(
        image=chosen,
        memory_mb=_memory_mb(memory_mb, offered),
        idle_s=_seconds("idle_seconds", idle_s, rules.idle_s),
        lifetime_s=lifetime,
    )


def _seconds(name: str, wish: float | None, most: float) -> float:
    if wish is None:
        return most
    if not math.isfinite(wish) or not 0 < wish <= most:
        raise InvalidParams(f"{name} must be over 0 and at most {most:g} here.", fields=[name])
    return float(wish)


def _memory_mb(wish: int | None, offered: WallLimits) -> int:
    least, most = offered.min_memory_mb, offered.max_memory_mb or offered.min_memory_mb
    if wish is None:
        wish = min(offered.default_memory_mb or least, most)
    elif not least <= wish <= most:
        raise InvalidParams(f"memory_mb must be from {least} to {most} here.", fields=["memory_mb"])
    return offered.memory_class(wish)
