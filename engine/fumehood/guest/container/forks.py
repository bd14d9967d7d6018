"""Fork hooks of modules: they run if a program forks, but not if a zygote does.

Guest side. `threading`, `random` and other modules register functions that run in every forked
child. A zygote has one thread, so they have nothing to repair in its children, and would take a
tenth of a child's start. They run again after `resume`, which each child calls before its program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ForkHooks:
    """Wraps `os.register_at_fork` for its later callers."""

    def __init__(self) -> None:
        self._are_held = True
        self._register: Callable[..., None] = os.register_at_fork

    def hold(self) -> None:
        """Hold back at-fork hooks that are registered from now on. Call it before other imports."""
        os.register_at_fork = self._held  # type: ignore[assignment]

    def resume(self) -> None:
        """Run all hooks at each fork from now on, including hooks registered later."""
        os.register_at_fork = self._register
        self._are_held = False

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """A context in which forks skip the disabled hooks. For a process with one thread whose
        copy continues in its place.
        """
        self._are_held = True
        try:
            yield
        finally:
            self._are_held = False

    def _held(self, **hooks: Callable[[], Any]) -> None:
        self._register(**{when: self._unless_held(hook) for when, hook in hooks.items()})

    def _unless_held(self, hook: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: None if self._are_held else hook()


HOOKS = ForkHooks()
