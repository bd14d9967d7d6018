"""Who is asking. Values only; who a socket's peer is, is found out in `http/peer.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OVERFLOW_UID = 65_534
"""Every user whom the kernel cannot name in the engine's user namespace. *Source*:
user_namespaces(7). Who may be anybody is nobody: one principal for all would mix them."""


class Scope(StrEnum):
    """What a principal may do."""

    CALL = "call"
    APPROVE = "approve"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody the engine knows. No scopes means that nothing is allowed.

    `agents` are those that it may speak for; none means for none.
    """

    id: str
    scopes: frozenset[Scope] = frozenset()
    agents: frozenset[str] = frozenset()
    token_id: str | None = None
    """The token that it brought, where it brought one: whoever acts for it later looks whether
    that is still good."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as the kernel attests it."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class TrustDomain:
    """Who may share a process one after the other: principal, agent and session."""

    principal_id: str
    agent_id: str | None = None
    session_id: str | None = None

    @property
    def key(self) -> str:
        """A string that is equal for equal domains only (the parts are length-prefixed)."""
        parts = (self.principal_id, self.agent_id or "", self.session_id or "")
        return "".join(f"{len(part)}:{part}" for part in parts)


def uid_principal_id(uid: int) -> str:
    """The principal id that a Unix user has where configuration gives no other."""
    return f"uid:{uid}"
