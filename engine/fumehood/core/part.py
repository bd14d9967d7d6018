"""Parts: features that can be deleted, and what each of them adds to the rest.

A part is a `Part` that an entry point of this distribution names, in the group `fumehood.parts`.
The rest never imports it: it asks `parts()`, and imports by name what is used. So a command does
not load what another part runs, and without a part's files and entry point everything else works.

Invariants: the order is fixed (by `Part.after`, then by name) and does not depend on the host; two
parts never add the same thing; entry points of other distributions are reported, never loaded.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fumehood.parts"
DISTRIBUTION = "fumehood"

Named = str
"""Where something is: `package.module:name`. It is imported when it is used."""


class PartError(Exception):
    """A part cannot be used. The engine does not start, because a gate could be missing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration: its type, and its value if it is absent."""

    type: Any
    default: Any


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, and the one that precedes it in `--help`."""

    help: str
    function: Named
    after: str


@dataclass(frozen=True, slots=True)
class Options:
    """Options that a part adds to a command of the kernel, and the parameter that they precede.

    `function` has these options as parameters, and may have some of the command's own. It is called
    before the command, which gets what it returns in a parameter `added`, if it has one.
    """

    command: str
    function: Named
    before: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check of `fumehood doctor`, and the one that precedes it.

    `function` takes the configuration and yields `Finding`s.
    """

    name: str
    function: Named
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part adds. Everything but the name is optional."""

    name: str
    after: tuple[str, ...] = ()
    """Parts that come before it, if they are there."""
    settings: Named | None = None
    """A mapping of keys of the configuration to `Setting`."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    options: tuple[Options, ...] = ()
    """Options of commands that are not the part's own."""
    checks: tuple[Check, ...] = ()
    approvers: Named | None = None
    """Takes the configuration, and returns names of what else than people may approve calls."""
    operations: Named | None = None
    """A list of operations of the callers' socket."""
    control_operations: Named | None = None
    """A list of operations of the control socket."""
    in_engine: Named | None = None
    """A subclass of `EnginePart` (`fumehood.engine_part`)."""


@cache
def parts() -> tuple[Part, ...]:
    """Return the parts of this distribution in their order.

    Raises:
        PartError: a part cannot be loaded, or two parts add the same thing.
    """
    # A sixth of the time of a command, most of which use no part.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        own = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise PartError("fumehood is not installed, so its parts cannot be found.") from None
    found: dict[str, Part] = {}
    for entry in own.entry_points.select(group=GROUP):
        part = _load(entry)
        if part.name != entry.name or part.name in found:
            raise PartError(f"The entry point {entry.name!r} names the part {part.name!r}.")
        found[part.name] = part
    made = ordered(found.values())
    for kind in ("commands", "checks"):
        _require_single(kind, made)
    return made


def ordered(found: Sequence[Part] | Any) -> tuple[Part, ...]:
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


def foreign() -> list[str]:
    """Return the entry points of other distributions that call themselves parts."""
    from importlib.metadata import entry_points

    return sorted(
        f"{entry.name} ({entry.dist.name})"
        for entry in entry_points(group=GROUP)
        if entry.dist is not None and entry.dist.name != DISTRIBUTION
    )


def imported(place: Named | None, default: Any = ()) -> Any:
    """Import what a part names. Without a name, return the default."""
    return default if place is None else pkgutil.resolve_name(place)


def placed(kernel: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """Return the names of the kernel and of parts, each of these after the one that it follows."""
    names = list(kernel)
    for name, after in added.items():
        names.insert(names.index(after) + 1 if after in names else len(names), name)
    return names


def _load(entry: EntryPoint) -> Part:
    try:
        part = entry.load()
    except Exception as fault:
        raise PartError(f"The part {entry.name!r} cannot be loaded: {fault}") from fault
    if not isinstance(part, Part):
        raise PartError(f"{entry.value} is not a part.")
    return part


def _require_single(kind: str, found: Sequence[Part]) -> None:
    by: dict[str, str] = {}
    for part, name in _names(kind, found):
        if name in by:
            raise PartError(f"The parts {by[name]!r} and {part!r} both add {name!r} to {kind}.")
        by[name] = part


def _names(kind: str, found: Sequence[Part]) -> Iterator[tuple[str, str]]:
    for part in found:
        for one in getattr(part, kind):
            yield part.name, one if isinstance(one, str) else one.name
