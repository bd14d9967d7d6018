"""Everything that a program can reach: walked, through the guards, as far as it goes.

From the names and modules that a program starts with, the walk reads every attribute that a
guard gives out, looks into containers, and calls what can be called with a few arguments.
Nothing that it finds may be a module, a frame, code, a namespace, or a function that opens,
imports, evaluates or reads attributes by name.
"""

from __future__ import annotations

import builtins
import collections
import functools
import importlib
import io
import operator
import os
import random
import string
import subprocess
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from fumehood.guest.interpreter import guards, modules, nodes
from fumehood.guest.interpreter.nodes import Refused
from fumehood.guest.interpreter.restricted import OutputFull, Run, compile_checked

MOST_STEPS = 60_000
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (), (1,), ("a",), (b"a",), ([3, 1, 2],), (1, 2), ("a", "b"), ("%Y", "a"), (2.5,),
    ([1, 2, 3], [2, 4, 7]), (max, [1, 2]), ("[]",), ((),), ({"a": 1},), (None,), (len,),
    (ValueError,), (ValueError("x"),),
)  # fmt: skip

SAMPLES = """
import collections, datetime, decimal, functools, json, random, re, statistics, typing
class Base(Exception):
    shared = [1]
    def __init__(self, value=1):
        super().__init__(value)
        self.value = value
    @property
    def doubled(self):
        return self.value * 2
class Derived(Base):
    def up(self):
        return super()
class Plain:
    def method(self):
        yield self
@functools.lru_cache
def cached(x):
    return x
def caught(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return error
Pair = collections.namedtuple("Pair", "left right")
now = datetime.datetime.now(datetime.timezone.utc)
samples = [
    1, 2.5, 1j, True, "a", b"a", bytearray(b"a"), None, (1,), [1], {1}, {1: 2}, frozenset([1]),
    range(3), slice(1), Base(), Base, Derived(), Derived, Derived().up(), Plain(), Plain,
    Plain().method, Plain().method(), Pair, Pair(1, 2), cached, cached.cache_info(), caught,
    Derived.doubled, lambda: 1, (x for x in [1]), int | str, list[int], typing.List[int],
    now, now.date(), now.time(), now.timetuple(), now.isocalendar(), now - now, now.tzinfo,
    decimal.Decimal("1.5"), decimal.Decimal(1).as_tuple(), decimal.getcontext(),
    re.compile("a"), re.match("(a)", "a"), random.Random(1), statistics.NormalDist(0, 1),
    statistics.linear_regression([1, 2], [2, 3]), collections.Counter("a"),
    collections.OrderedDict(a=1), collections.defaultdict(list), collections.deque([1]),
    caught(json.loads, "x"), caught(re.compile, "("), caught(next, iter([])), caught(int, "x"),
    caught(lambda: nope), caught(lambda: Plain().nope), caught(decimal.Decimal, "x"),
]
"""

FORBIDDEN_TYPES = (
    types.ModuleType, types.FrameType, types.CodeType, types.TracebackType, types.CellType,
    types.MappingProxyType, types.CoroutineType, types.SimpleNamespace, memoryview,
    io.IOBase, operator.attrgetter, operator.methodcaller, string.Formatter, string.Template,
)  # fmt: skip
FORBIDDEN = [
    *(getattr(builtins, name) for name in (
        "open", "eval", "exec", "compile", "__import__", "getattr", "setattr", "delattr",
        "hasattr", "vars", "globals", "locals", "dir", "input", "breakpoint", "type", "memoryview",
        "id", "hash", "help", "exit", "quit", "BaseException", "SystemExit", "KeyboardInterrupt",
        "GeneratorExit", "BaseExceptionGroup", "ExceptionGroup",
    ) if hasattr(builtins, name)),
    object.__getattribute__, object.__subclasses__, object.__reduce_ex__, type.__call__,
    *FORBIDDEN_TYPES, types.FunctionType, types.LambdaType, types.MethodType,
    functools.update_wrapper, functools.wraps, functools.singledispatch, functools.cached_property,
    collections.namedtuple, collections.UserDict, collections.UserString,
    importlib.import_module, os.system, os.open, subprocess.Popen, sys.exit, sys._getframe,
    random.SystemRandom, io.open_code, io.FileIO,
]  # fmt: skip

FORBIDDEN_IDS = {id(forbidden) for forbidden in FORBIDDEN}


@pytest.fixture
def program() -> Iterator[Run]:
    """A program before its first line."""
    state = random.getstate()
    yield Run("", 1 << 20)
    random.setstate(state)


class Walk:
    """What was found, and by which way."""

    def __init__(self, run: Run) -> None:
        self.guards = run._guards
        self.seen: dict[int, Any] = {}
        self.ways: dict[int, str] = {}
        self.reads = self.calls = 0
        self._todo: deque[Any] = deque()

    def add(self, found: Any, way: str, *, sample: bool = False) -> None:
        kind = type(found)
        is_leaf = kind in (int, float, complex, bool, str, bytes, type(None))
        if (is_leaf and not sample) or id(found) in self.seen:
            return
        self.seen[id(found)] = found  # kept, or its number would be given to another
        self.ways[id(found)] = way
        self._todo.append(found)

    def go(self) -> None:
        everything = sorted(set().union(*guards.ATTRIBUTES.values(), *modules.MODULES.values()))
        while (
            self._todo and self.reads + self.calls < MOST_STEPS * 20 and len(self.seen) < MOST_STEPS
        ):
            found = self._todo.popleft()
            way = self.ways[id(found)]
            self._read(found, way, everything)
            if len(way) < 60:
                self._look_into(found, way)
                self._call(found, way)

    def _read(self, found: Any, way: str, everything: list[str]) -> None:
        try:
            own = dir(found) + dir(type(found))
        except Exception:
            own = []
        for name in {*own, *everything} if not isinstance(found, list) else own:
            self.reads += 1
            try:
                value = self.guards.get_attribute(found, name)
            except (Refused, AttributeError):
                continue
            assert not name.startswith("_"), (way, name)
            self.add(value, f"{way}.{name}")

    def _look_into(self, found: Any, way: str) -> None:
        if isinstance(found, dict):
            for key, value in list(found.items())[:50]:
                self.add(key, f"{way}.key")
                self.add(value, f"{way}[{str(key)[:9]}]")
        elif isinstance(found, list | tuple | set | frozenset | deque):
            for value in list(found)[:50]:
                self.add(value, f"{way}[…]")
        elif isinstance(found, types.GeneratorType) or hasattr(type(found), "__next__"):
            try:
                self.add(next(found), f"next({way})")
            except (Exception, Refused):
                return

    def _call(self, found: Any, way: str) -> None:
        if not callable(found):
            return
        for arguments in ARGUMENTS:
            self.calls += 1
            try:
                self.add(found(*arguments), f"{way}(…)")
            except Exception as failure:
                self.add(failure, f"{way}(…) failed")
                self.add(failure.args, f"{way}(…) failed.args")
            except (Refused, OutputFull):
                continue


@pytest.mark.row("S2")
def test_no_powerful_object_is_reachable_through_the_guards(program: Run) -> None:
    walk = Walk(program)
    namespace = program.namespace()
    finder = namespace[modules.FINDER]
    for name in modules.MODULES:
        walk.add(finder.find(name), name)
    for name in nodes.STATIC:
        walk.add(nodes.STATIC[name], name)
    walk.add(namespace["type"], "type")
    walk.add(namespace["_print_"](None)._call_print, "print")
    exec(compile_checked(SAMPLES), namespace)
    for sample in namespace["samples"]:
        walk.add(sample, type(sample).__name__, sample=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        walk.go()

    assert walk.reads > 200_000
    assert walk.calls > 5_000
    assert 3000 < len(walk.seen) < MOST_STEPS
    kinds = {type(found) for found in walk.seen.values()}
    # It has been where it had to go: into each kind of thing that the table has rows for.
    reached = {base for kind in kinds for base in kind.__mro__}
    assert not guards.ATTRIBUTES.keys() - reached
    for found in walk.seen.values():
        way = walk.ways[id(found)]
        assert not isinstance(found, FORBIDDEN_TYPES), way
        assert id(found) not in FORBIDDEN_IDS, way
        assert not (isinstance(found, dict) and {"__builtins__", "__name__"} & found.keys()), way
        owner = getattr(found, "__self__", None)
        assert not isinstance(owner, types.ModuleType) or owner.__name__ in HARMLESS_OWNERS, way


HARMLESS_OWNERS = {
    "builtins", "math", "itertools", "_operator", "_heapq", "_bisect", "_functools", "_decimal",
    "_statistics", "decimal", "_collections",
}  # fmt: skip
"""A built-in function's module, which no guard gives out; these have none but such functions."""


def test_control_walk_without_guards_finds_powerful_objects(program: Run) -> None:
    """The same walk with plain `getattr` and real modules finds at once what it must not."""
    walk = Walk(program)
    walk.guards = types.SimpleNamespace(get_attribute=getattr)  # type: ignore[assignment]
    found = []
    for name in ("json", "re", "statistics", "random", "collections"):
        module = importlib.import_module(name)
        for attribute in dir(module):
            value = walk.guards.get_attribute(module, attribute)
            if isinstance(value, FORBIDDEN_TYPES) or id(value) in FORBIDDEN_IDS:
                found.append(f"{name}.{attribute}")
    assert {"json.codecs", "re.enum", "statistics.sys", "collections.namedtuple"} <= set(found)


@pytest.mark.row("S2")
def test_unknown_modules_are_empty_and_nothing_is_imported() -> None:
    before = set(sys.modules)
    finder = modules.ModuleFinder({})
    for name in ("os", "sys", "xmlrpc.client", "no.such.module"):
        assert not finder.find(name).members
        assert not modules.import_module(name, {modules.FINDER: finder}).members
        assert not modules.import_module(name).members
    assert set(sys.modules) == before
