"""Modules that a zygote of the other kind would have loaded ahead, loaded by a program itself.

Guest side, in the child of a thin zygote. A program whose text did not show that it imports them
finds them as if they had been there: with the same settings, and Matplotlib with the image's list
of fonts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Around = Callable[[], AbstractContextManager[object]]


class LateModules:
    """A finder that does something around the loading of certain modules, and nothing else."""

    def __init__(self) -> None:
        self.around: dict[str, Around] = {}

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks for it; only for the modules that are known here."""
        around = self.around.get(name)
        spec = PathFinder.find_spec(name, path, target) if around is not None else None  # type: ignore[arg-type]
        if around is None or spec is None or spec.loader is None:
            return None
        loader, load = spec.loader, spec.loader.exec_module

        def load_within(module: ModuleType) -> None:
            del loader.exec_module  # once; the class's own is there again
            with around():
                load(module)

        loader.exec_module = load_within  # type: ignore[method-assign]
        return spec


def late_modules() -> LateModules | None:
    """The finder of this process, or None if everything is preloaded."""
    return next((finder for finder in sys.meta_path if isinstance(finder, LateModules)), None)
