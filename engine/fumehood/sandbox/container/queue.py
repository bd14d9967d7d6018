"""The line in front of the pool: who waits for a container, and whose turn it is.

Host side, pure. Invariant: the line is bounded, for everybody together, for each principal and
for each of its trust domains. It goes round between principals, then between the domains of one;
within a domain it is first come, first served. So nobody gets more by having many sessions.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, TypeVar

from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.pool_entry import Kind

Granted = TypeVar("Granted")

MAX_WAITING = 2000
MAX_WAITING_OF_PRINCIPAL = 1000
MAX_WAITING_OF_DOMAIN = 500


class LineFull(Exception):
    """Too many wait already."""


@dataclass(eq=False, slots=True)
class PoolRequest(Generic[Granted]):
    """One call that wants a container."""

    domain: TrustDomain
    kind: Kind
    fresh: bool
    granted: asyncio.Future[Granted] = field(repr=False)
    is_being_made: bool = False
    """Whether a container is being made for it."""


class FairQueue(Generic[Granted]):
    """Waiters of all principals."""

    def __init__(self) -> None:
        self._principals: OrderedDict[str, OrderedDict[TrustDomain, list[PoolRequest[Granted]]]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return sum(map(_waiting, self._principals.values()))

    def __iter__(self) -> Iterator[PoolRequest[Granted]]:
        everybody = self._principals.values()
        return iter([one for domains in everybody for mine in domains.values() for one in mine])

    def join(self, waiter: PoolRequest[Granted]) -> None:
        """Stand at the end of one's own domain. Raises LineFull."""
        domains = self._principals.get(waiter.domain.principal_id, OrderedDict())
        mine = domains.get(waiter.domain, [])
        if (
            len(mine) >= MAX_WAITING_OF_DOMAIN
            or _waiting(domains) >= MAX_WAITING_OF_PRINCIPAL
            or len(self) >= MAX_WAITING
        ):
            raise LineFull
        mine.append(waiter)
        domains.setdefault(waiter.domain, mine)
        self._principals.setdefault(waiter.domain.principal_id, domains)

    def leave(self, waiter: PoolRequest[Granted]) -> None:
        """Wait no more. Harmless for one that does not stand here."""
        principal_id = waiter.domain.principal_id
        domains = self._principals.get(principal_id, OrderedDict())
        mine = domains.get(waiter.domain, [])
        if waiter in mine:
            mine.remove(waiter)
            if not mine:
                del domains[waiter.domain]
            if not domains:
                del self._principals[principal_id]

    def pass_on(self, waiter: PoolRequest[Granted]) -> None:
        """Its principal and its domain have had this turn, whether or not it still waits."""
        principal_id = waiter.domain.principal_id
        if principal_id in self._principals:
            self._principals.move_to_end(principal_id)
            if waiter.domain in self._principals[principal_id]:
                self._principals[principal_id].move_to_end(waiter.domain)

    def in_turn(self) -> Iterator[list[PoolRequest[Granted]]]:
        """The waiters of each domain, in the order of the round. Safe against changes."""
        columns = [list(domains.values()) for domains in self._principals.values()]
        for row in zip_longest(*columns, fillvalue=()):
            for mine in row:
                yield list(mine)


def _waiting(domains: OrderedDict[TrustDomain, list[PoolRequest[Granted]]]) -> int:
    return sum(map(len, domains.values()))
