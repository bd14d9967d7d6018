"""Parts: features that can be deleted, and what each of them adds to the rest.

A `Part` names what it adds as `module:name`, so that reading the parts imports nothing that they
run. `fumehood/parts.py` finds them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Generic, TypeVar

from fumehood.core.errors import FumehoodError

V = TypeVar("V")

Named = str
"""Where something is: `package.module:name`. It is imported when it is used."""


class PartError(FumehoodError):
    """A part cannot be used. The engine does not start, because a gate could be missing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration: its type, and its value if it is absent."""

    type: Any
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOption(Generic[V]):
    """An option of a call. The kernel only passes its value on: it opens no gate."""

    name: str
    type: Any
    default: V
    decides: bool = True
    """Whether it changes what a call does. Then a key, an approval and a remembered rule are for
    its value, and no result of an equal call answers a call with it."""
    inherited: bool = False
    """Whether the calls that a program makes also have its value."""
    check: Callable[[Any, Any], None] | None = None
    """Takes a permitted call with another value than the default, and its plan. Raises EngineError
    if they do not go together."""

    def of(self, options: object) -> V:
        """Return its value in the options of a call."""
        value: V = getattr(options, self.name, self.default)
        return value


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, and the one that precedes it in `--help`.

    `function` is what Typer makes the command from, or in a group of the kernel also a `Typer`,
    which becomes a group in it, after its commands.
    """

    help: str
    function: Named
    after: str


@dataclass(frozen=True, slots=True)
class Options:
    """Options that a part adds to a command of the kernel, and the parameter that they precede.

    `function` has these options as parameters, and may have some of the command's own. It is called
    before the command, which gets what it returns in a parameter `added`, if it has one. It may end
    the process instead.
    """

    command: str
    function: Named
    before: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check of `fumehood doctor`, and the one that precedes it.

    `function` takes the configuration and yields `Finding`s. A check with a `group` of its own is
    shown below this title, after the group `after` of the kernel, and is run by every user; the
    others are checks of authority.
    """

    name: str
    function: Named
    after: str
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKind:
    """An executor that a part adds, and the tools that it runs."""

    executor: Named
    """A subclass of `Executor` (`executors/base.py`)."""
    type: str | None = None
    """The type of tools that another service runs, and that only this executor calls. Their
    definitions may come from outside the engine; a `ToolType`."""
    fields: frozenset[str] = frozenset()
    """Names in `registry.definitions.FIELDS` that definitions of this type may have."""
    place: str
    """Where such tools run, for people."""
    why: str
    """Why they run there, for people."""
    recipient: str | None = None
    """The key that names the recipient in what approvers see of a call (`Executor.sends`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part adds. Everything but the name is optional."""

    name: str
    after: tuple[str, ...] = ()
    """Parts that come before it, if they are there."""
    settings: Named | None = None
    """A mapping of keys of the configuration to `Setting`."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands by name; `GROUP NAME` is one of a group of the kernel."""
    options: tuple[Options, ...] = ()
    """Options of commands that are not the part's own."""
    gives: frozenset[str] = frozenset()
    """What programs get only from this part: names in `needs_of` (`executors/around.py`)."""
    call_options: Named | None = None
    """A sequence of `CallOption`s."""
    checks: tuple[Check, ...] = ()
    approvers: Named | None = None
    """Takes the configuration, and returns names of what else than people may approve calls."""
    operations: Named | None = None
    """A list of operations of the callers' socket. One at a method and address of the kernel's
    replaces that one, and must need the same authority.
    """
    control_operations: Named | None = None
    """A list of operations of the control socket, in the same way."""
    exports: Mapping[str, Named] = field(default_factory=dict)
    """Formats in which tools are exported. Each place takes a definition and returns its form."""
    mounts: Mapping[str, Named] = field(default_factory=dict)
    """Paths of the callers' socket. Each place takes the engine and returns an ASGI application."""
    methods: Mapping[str, Named] = field(default_factory=dict)
    """Name of a public class of the product (`Engine`, a client) → a subclass of the kernel's class
    of that name, with the methods that the part adds. Only for the product's own parts: type
    checkers must see them.
    """
    in_foreground: Named | None = None
    """Takes the configuration of a daemon that a person watches, and returns it as it is used."""
    executors: Mapping[str, ToolKind] = field(default_factory=dict)
    """Names that definitions can have in `executor`."""
    definitions: Named | None = None
    """Takes the document of a tool's definition, and yields what is wrong in it. It is refused for
    that.
    """
    coming: Named | None = None
    """Takes the configuration, and returns prefixes of names of tools that are registered later. A
    policy may name them before."""
    in_engine: Named | None = None
    """A subclass of `EnginePart` (`fumehood.engine_part`)."""


@contextmanager
def named_faults(what: str) -> Iterator[None]:
    """Raise PartError, beginning with `what`, instead of an exception that is not the engine's."""
    try:
        yield
    except FumehoodError:
        raise
    except Exception as fault:
        raise PartError(f"{what}: {fault}") from fault


def ordered(found: Iterable[Part]) -> tuple[Part, ...]:
    """Sort parts by `after`, then by name. Raises PartError if that is not possible."""
    by_name = {part.name: part for part in found}
    graph = TopologicalSorter(
        {name: [a for a in by_name[name].after if a in by_name] for name in by_name}
    )
    names: list[str] = []
    try:
        graph.prepare()
    except CycleError as error:
        raise PartError(f"These parts must each precede the other: {error.args[1]}.") from None
    while graph.is_active():
        ready = sorted(graph.get_ready())
        names += ready
        graph.done(*ready)
    return tuple(by_name[name] for name in names)


def imported(place: Named | None, default: Any = ()) -> Any:
    """Import what a part names. Without a name, return the default."""
    return default if place is None else pkgutil.resolve_name(place)


def placed(kernel: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """Return the names of the kernel and of parts, each of these after the one that it follows."""
    names = list(kernel)
    for name, after in added.items():
        names.insert(names.index(after) + 1 if after in names else len(names), name)
    return names
