"""From the peer at the socket to the principal of a call.

Host side. In single-user mode, the only one of this version, the daemon's own uid is the
one principal; whoever else can reach the socket (root can) is nobody.
"""

from __future__ import annotations

import os
from functools import cache

from starlette.requests import Request

from fumehood.gates.identity import require_caller
from fumehood.model.identity import Peer, Principal, Scope, uid_principal_id


def principal_of(request: Request) -> Principal | None:
    """The principal at the other end, or None where the engine knows nobody there."""
    peer: Peer = request.scope["state"]["peer"]
    return _owner(peer.uid) if peer.uid == os.geteuid() else None


@cache
def _owner(uid: int) -> Principal:
    return Principal(uid_principal_id(uid), frozenset({Scope.CALL}))


def require_principal(request: Request) -> Principal:
    """Raises Unauthorized where `principal_of` finds nobody."""
    return require_caller(principal_of(request))
