"""Provides Python programs with the modules in `fumehood.guest.given`.

Guest side, in the child. A program gets a module if the host has sent an argument with the module's
name. The code for the modules is loaded in the zygote. The modules themselves are created for each
program.
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
    """Creates one kind of module that the guest provides to programs, such as `tools`. Each program
    gets a new module.
    """

    def make(self, sent: Any, writing: threading.Lock) -> ModuleType:
        """Return the module for a program that is about to start. The program can import it.

        `sent` is what the host sent for the module. The module's functions hold the lock `writing`
        while they write a message to the reply pipe.
        """

    def close(self) -> None:
        """Stop the module from sending anything more, because the program has ended. Waits until no
        frame is being written.
        """


_MODULES = modules_of(given)


class GivenModules:
    """Provides programs with the modules that the guest creates for them, such as `tools`. One
    object serves all programs that run in a process, one after the other.
    """

    def __init__(self) -> None:
        self._makers: dict[str, Maker] = {}
        self._writing = threading.Lock()
        self._pid = 0
        """Id of the process whose program has given modules now, or 0 if no program has any."""

    def give(self, arguments: Mapping[str, Any]) -> None:
        """Create the modules of the next program. `arguments` are the arguments of its call: the
        program gets a module if there is an argument with the module's name. Modules that only an
        earlier program had are removed.
        """
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
        """A context that other code must enter to write a frame, so that the frame is not written
        into the middle of a module's frame.
        """
        return self._writing if self._pid == os.getpid() else contextlib.nullcontext()
