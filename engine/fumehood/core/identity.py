"""Identities: principals, peers and trust domains. Values only; `http/peer.py` identifies peers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OVERFLOW_UID = 65_534
"""The uid that stands for every user who is not mapped into the engine's user namespace. This uid
gets no principal, because all these users would share it. *Source*: user_namespaces(7).
"""


class Scope(StrEnum):
    """A right that a principal can have."""

    CALL = "call"
    APPROVE = "approve"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. A principal without scopes may do nothing.

    `agents` are the agents for which the principal may act. If `agents` is empty, the principal may
    act for no agent.
    """

    id: str
    scopes: frozenset[Scope] = frozenset()
    agents: frozenset[str] = frozenset()
    token_id: str | None = None
    """The token that the caller presented, if any. Code that later acts for the caller checks the
    token again."""
    is_program: bool = False
    """Whether the caller is the program that embeds the engine, and therefore the operator."""

    @property
    def has_authenticated(self) -> bool:
        """Whether the caller has presented a token, or is the program that embeds the engine."""
        return self.token_id is not None or self.is_program


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as the Linux kernel attests it."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class TrustDomain:
    """A principal, an agent and a session. Two calls may use the same sandbox process only if they
    have the same trust domain.

    Even such calls use the process one at a time.
    """

    principal_id: str
    agent_id: str | None = None
    session_id: str | None = None

    @property
    def key(self) -> str:
        """A string that identifies the trust domain. Its parts are length-prefixed, so different
        domains always have different keys.
        """
        parts = (self.principal_id, self.agent_id or "", self.session_id or "")
        return "".join(f"{len(part)}:{part}" for part in parts)


def uid_principal_id(uid: int) -> str:
    """Return the principal id of a Unix user who is not assigned to a principal in the
    configuration.
    """
    return f"uid:{uid}"
