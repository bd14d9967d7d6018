"""One row an attack: what it tries, what it would harm, how it must end, and its twin."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Harm(StrEnum):
    """What an attack that succeeds would have done (classes after gVisor's security policy)."""

    ESCAPE = "escape"
    HOST_LEAK = "host_leak"
    EXFIL = "exfil"
    LATERAL = "lateral"
    HOST_DOS = "host_dos"
    PEER_DOS = "peer_dos"
    INTERNAL_ESC = "internal_esc"
    INTERNAL_READ = "internal_read"
    SELF_DOS = "self_dos"
    INTEGRITY = "integrity"


@dataclass(frozen=True)
class Attack:
    """`code` must end as `ends`; `twin`, the nearest harmless program, must succeed."""

    name: str
    harm: Harm
    code: str
    ends: str
    twin: str
    source: str = "own"

    def __str__(self) -> str:
        return self.name
