"""What modules registered for a fork runs in programs' forks and not in a zygote's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fumehood.guest.container.forks import ForkHooks


@pytest.fixture
def hooks() -> Iterator[ForkHooks]:
    register = os.register_at_fork
    yield ForkHooks()
    os.register_at_fork = register


def child_says(ran: list[str]) -> str:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writable, b"ran" if ran else b"did not run")
        os._exit(0)
    os.close(writable)
    os.waitpid(pid, 0)
    said = os.read(readable, 100).decode()
    os.close(readable)
    return said


def test_held_fork_hook_is_skipped_on_request_and_runs_later(hooks: ForkHooks) -> None:
    ran: list[str] = []
    hooks.hold()
    os.register_at_fork(after_in_child=lambda: ran.append("held"))
    assert child_says(ran) == "did not run"
    hooks.resume()
    with hooks.skipped():
        assert child_says(ran) == "did not run"
    assert child_says(ran) == "ran"
