"""Registered processes as the supervisor sees them, without keepers."""

from __future__ import annotations

import selectors
import socket
from typing import Any

import pytest

from fumehood.guest.container.keeper import Ring
from fumehood.guest.container.registered import Registered, _Process

pytestmark = pytest.mark.row("S6")

KEEPER = 2**22 + 1
"""No process has this id."""


class SilentHost:
    keep = 5

    def send(self, message: dict[str, Any]) -> None:
        pass


def test_message_of_a_keeper_that_was_reaped_in_the_same_turn_is_no_fault() -> None:
    """The signal of its death was first among the events of one turn, its last message second."""
    with selectors.DefaultSelector() as selector:
        registered = Registered(  # type: ignore[arg-type]
            SilentHost(), selector, list, lambda: None, is_watched=False
        )
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = _Process("a", KEEPER, ours, Ring(), 0.0)
        registered._all["a"] = registered._keepers[KEEPER] = process
        selector.register(ours, selectors.EVENT_READ, lambda: registered._on_event(process))
        theirs.close()
        ((key, _),) = selector.select(1)
        assert registered.on_reaped(KEEPER)
        key.data()
        assert process.state == "ended"
        process.ring.close()
