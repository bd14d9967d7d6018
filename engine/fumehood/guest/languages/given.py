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
    """Creates one kind of module for programs, such as `tools`. Each program gets a new module."""

    def make(self, sent: Any, writing: threading.Lock) -> ModuleType:
        """Create and return the module for the program that starts next. `sent` is what the host
        has sent for this module. The module's functions must hold the lock `writing` while they
        write a message to the reply pipe.
        """

    def close(self) -> None:
        """Prevent the module from sending anything more, because its program has ended. If the
        module is writing a message, wait until it is complete.
        """


_MODULES = modules_of(given)


class GivenModules:
    """Creates the modules that programs get from the guest, such as `tools`. One object serves all
    programs of a process, one after the other.
    """

    def __init__(self) -> None:
        self._makers: dict[str, Maker] = {}
        self._writing = threading.Lock()
        self._pid = 0
        """Id of the process whose program has given modules now, or 0 if no program has any."""

    def give(self, arguments: Mapping[str, Any]) -> None:
        """Create the modules of the program that starts next. `arguments` are the arguments of its
        call. If there is an argument with a module's name, the program gets that module. Modules of
        the earlier program that this program does not get are removed.
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
        """A context in which no module writes a message. Other code must enter it to write a
        message of its own.
        """
        return self._writing if self._pid == os.getpid() else contextlib.nullcontext()
