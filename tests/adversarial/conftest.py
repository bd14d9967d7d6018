"""Beside every attack a client asks for the engine's health, with a bound on its wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from support.health import Health, asking_for_health


@pytest.fixture(autouse=True)
def health(monkeypatch: pytest.MonkeyPatch) -> Iterator[Health]:
    """Fail the test if an engine in this process, or a daemon, kept others waiting for too long."""
    found = Health()
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        found.note(time.thread_time() - began_s, repr(handle))

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    with asking_for_health(found):
        yield found
    assert found.longest_s < found.limit_s, found.what
