"""Modules that the guest gives to programs: who gets one, and for how long."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fumehood.guest.languages import given
from fumehood.guest.languages.given import GivenModules

pytestmark = pytest.mark.row("B3")

NAME = "a_given_module"


class Maker:
    """Makes an empty module, and notes what it got."""

    made: list[Maker] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = 0

    def make(self, sent: Any, writing: threading.Lock) -> ModuleType:
        self.sent.append(sent)
        self.writing = writing
        Maker.made.append(self)
        return ModuleType(NAME)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> GivenModules:
    monkeypatch.setattr(given, "_MODULES", {NAME: SimpleNamespace(Maker=Maker)})
    monkeypatch.setattr(Maker, "made", [])
    return GivenModules()


def is_there() -> bool:
    assert (NAME in sys.modules) is hasattr(builtins, NAME)
    return NAME in sys.modules


def test_program_has_a_module_only_if_the_host_sends_its_argument(modules: GivenModules) -> None:
    seen = []
    for arguments in ({}, {NAME: ["a"], "code": "1"}, {"code": "1"}, {NAME: None}, {NAME: []}, {}):
        modules.give(arguments)
        seen.append(is_there())
        modules.close()
    assert seen == [False, True, False, False, True, False]
    assert [maker.sent for maker in Maker.made] == [[["a"], []]] * 2  # one maker for all programs
    assert Maker.made[0].closed == 5


def test_other_code_waits_while_a_module_of_this_process_writes(
    modules: GivenModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_free() -> bool:
        return isinstance(modules.writing, contextlib.nullcontext)

    assert is_free()
    modules.give({NAME: 1})
    first = Maker.made[0].writing
    assert modules.writing is first
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert is_free()  # the lock may be held by a thread that the fork does not have
    modules.close()
    assert is_free()
    modules.give({NAME: 1})
    assert Maker.made[0].writing is not first  # which a thread of the last program may hold
    modules.give({})
