"""The supervisor's side of a zygote that dies."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from fumehood.guest.container.prefork_pool import PreforkFailed, PreforkPool, Zygote

pytestmark = pytest.mark.row("S1")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def pool_of(orders: socket.socket) -> PreforkPool:
    null = os.open(os.devnull, os.O_RDWR)
    return PreforkPool(
        Zygote(1, orders), 1, selectors.DefaultSelector(), (null, null),
        on_ready=lambda: None, on_end=lambda notice: None,
    )  # fmt: skip


def test_zygote_death_with_an_unread_order_is_reported(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    pool = pool_of(ours)
    pool.stock()
    pool.receive()  # the twin: it has not answered yet
    theirs.close()
    with pytest.raises(PreforkFailed, match="the zygote is gone"):
        pool.receive()


def test_dead_zygote_gets_no_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    pool = pool_of(ours)
    theirs.close()
    with pytest.raises(PreforkFailed, match="the zygote is gone"):
        pool.stock()
