"""The modules in `fumehood.guest.libraries`, and what surrounds the imports of programs.

Guest side, in the child and its zygote. A module there supports one library: it sets the library
up, and adds what programs make with it to their results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Protocol, cast

from fumehood.guest import libraries
from fumehood.guest.container.places import TEMPORARY
from fumehood.guest.core.modules import modules_of

PICTURES = f"{TEMPORARY}/.fumehood-figures"
"""The directory of a program's figures, which are sent to the host as images."""

MAX_NOTES = 5
"""Maximum number of notes about one result."""

Around = Callable[[], AbstractContextManager[object]]


class Results(Protocol):
    """Collects what programs produce with one library, such as figures, and stores it. The stored
    results are sent to the host later.
    """

    notes: list[str]
    """What is missing in the last run's results, and why."""

    def begin(self) -> None:
        """Prepare for the next run."""

    def take(self) -> None:
        """Store the results of the run. Raises MemoryError if there is not enough memory, with a
        message that names the result.
        """


class Library(Protocol):
    """The interface of a module in `fumehood.guest.libraries`. Such a module sets up one library,
    and collects what programs produce with this library.
    """

    AROUND: Mapping[str, Around]
    """Name of a module → what surrounds a program's own import of the module."""

    Results: Callable[[int], Results]
    """Creates the results of a main module, given the memory in bytes that storing may use."""

    def preload(self, modules: Sequence[str]) -> None:
        """Load the library in the zygote if it is among the image's modules."""


def late_modules() -> LateModules:
    """Return the only `LateModules` of this process. At the first call, create it and add it to
    Python's import finders.
    """
    for finder in sys.meta_path:
        if isinstance(finder, LateModules):
            return finder
    sys.meta_path.insert(0, made := LateModules())
    return made


class LateModules:
    """An import finder that runs code before and after a module is loaded. `around` maps the
    module's name to a function that returns a context manager. The module is loaded inside this
    context.
    """

    def __init__(self) -> None:
        self.around: dict[str, Around] = {}

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the module `name` if `around` has this name and the module exists.
        Otherwise, return None. The spec's loader loads the module inside the context from `around`.
        """
        around = self.around.get(name)
        spec = PathFinder.find_spec(name, path, target) if around is not None else None  # type: ignore[arg-type]
        if around is None or spec is None or spec.loader is None:
            return None
        loader, load = spec.loader, spec.loader.exec_module

        def load_within(module: ModuleType) -> None:
            del loader.exec_module  # only once: this restores the method of the loader's class
            with around():
                load(module)

        loader.exec_module = load_within  # type: ignore[method-assign]
        return spec


LIBRARIES = [cast("Library", module) for module in modules_of(libraries).values()]
