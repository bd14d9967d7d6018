"""Fork hooks of modules: they run if a program forks, but not if a zygote does.

Guest side. `threading`, `random` and others register functions that run in every forked child.
In a zygote's child they have nothing to repair, for a zygote has one thread, and cost it a tenth
of its start. They run again once `resume` was called, which each child does before its program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ForkHooks:
    """Stands between `os.register_at_fork` and its later callers."""

    def __init__(self) -> None:
        self._are_held = True
        self._register: Callable[..., None] = os.register_at_fork

    def hold(self) -> None:
        """Hold back hooks that are registered from now on. To be called before other imports."""
        os.register_at_fork = self._held  # type: ignore[assignment]

    def resume(self) -> None:
        """Run all hooks at each fork from now on, also those that are registered later."""
        os.register_at_fork = self._register
        self._are_held = False

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Fork within this without the hooks that were held back. For a process with one thread,
        whose copy goes on in its place.
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
