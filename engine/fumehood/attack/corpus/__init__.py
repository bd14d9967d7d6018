"""The corpus: every attack as a row of a table, one module for each wall."""

from __future__ import annotations

from fumehood.attack.attack import Attack
from fumehood.attack.corpus import container, gateway, interpreter, jail

_BY_WALL: dict[str, tuple[Attack, ...]] = {
    "interpreter": interpreter.ATTACKS,
    "jail": jail.ATTACKS,
    "container": container.ATTACKS,
    "gateway": gateway.ATTACKS,
}


def attacks_on(wall: str) -> tuple[Attack, ...]:
    """Return the attacks on one wall, in the order in which they are run."""
    return _BY_WALL[wall]
