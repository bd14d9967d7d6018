"""Fork hooks of modules: they run if a program forks, but not if a zygote forks.

Guest side. `threading`, `random` and other modules register functions, the hooks, that run in every
forked child. A zygote has only one thread, so the hooks have nothing to repair in its children, and
would take a tenth of a child's start time. Each child calls `resume` before its program runs. From
then on, the hooks run at each fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ForkHooks:
    """Wraps `os.register_at_fork`, so that hooks that are registered later can be disabled."""

    def __init__(self) -> None:
        self._are_held = True
        self._register: Callable[..., None] = os.register_at_fork

    def hold(self) -> None:
        """Disable all hooks that are registered from now on, until `resume` is called. Call this
        before other modules are imported.
        """
        os.register_at_fork = self._held  # type: ignore[assignment]

    def resume(self) -> None:
        """Enable all hooks, those already registered and those registered later."""
        os.register_at_fork = self._register
        self._are_held = False

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Disable all hooks that were registered after `hold`, while the `with` block runs.

        The caller must be a process with a single thread, which forks a copy to take its own place.
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
