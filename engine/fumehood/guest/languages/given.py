"""Give Python programs the modules that parts of the host have for them (`fumehood.guest.given`).

Guest side, in the child. A program gets a module if the host has sent an argument of the module's
name. The modules are loaded in the zygote, and made for each program.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from fumehood.guest import given
from fumehood.guest.core.modules import modules_of


class Maker(Protocol):
    """Makes one module for the programs of a main module, one after the other."""

    def make(self, sent: Any, writing: threading.Lock) -> ModuleType:
        """Return the module for a program that is about to start. `sent` is the host's argument.
        Code of the module holds `writing` while it writes a frame to the reply pipe.
        """

    def close(self) -> None:
        """Let the module send nothing more, because the program has ended. Waits until no frame is
        being written.
        """


_MODULES = modules_of(given)


class GivenModules:
    """The modules that the programs of one main module get."""

    def __init__(self) -> None:
        self._makers: dict[str, Maker] = {}
        self._writing = threading.Lock()
        self._pid = 0
        """The process that has modules now, or 0."""

    def give(self, arguments: Mapping[str, Any]) -> None:
        """Make the modules of the next program, and remove the other modules of the last one."""
        self._writing = threading.Lock()  # a thread of the last program may hold the old lock
        for name, module in _MODULES.items():
            if arguments.get(name) is not None:
                maker = self._makers.setdefault(name, module.Maker())
                sys.modules[name] = made = maker.make(arguments[name], self._writing)
                # Also a built-in name, so that a program that forgets the import does not fail.
                setattr(builtins, name, made)
                self._pid = os.getpid()
            elif name in self._makers and hasattr(builtins, name):
                sys.modules.pop(name, None)
                delattr(builtins, name)

    def close(self) -> None:
        """Close the modules, because their program has ended."""
        for maker in self._makers.values():
            maker.close()
        self._pid = 0

    @property
    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Held by other code while it writes a frame, so that the frame is not written into the
        middle of another.
        """
        return self._writing if self._pid == os.getpid() else contextlib.nullcontext()
