"""Parts: features that can be deleted, and what each part adds to the rest of the product.

A `Part` names its additions as `module:name`, so that reading the parts does not import the code
that they run. `fumehood/parts.py` finds the parts.
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

SESSION_OPTIONS = ("durable",)
"""Fields of `SessionFields` that are refused unless a part provides them."""

Named = str
"""Where an object is, as `package.module:name`. The module is imported when the object is used."""


class PartError(FumehoodError):
    """A part cannot be used.

    The engine then does not start, because a missing part might mean a missing gate.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration key of a part: the type of its value, and the default value."""

    type: Any
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOption(Generic[V]):
    """An option that a part adds to calls. The kernel only stores the option's value and passes it
    on.
    """

    name: str
    type: Any
    default: V
    decides: bool = True
    """Whether the option changes what a call does. If so, an idempotency key, an approval and a
    remembered rule apply only to this value, and a call with another value than the default is
    never answered with the result of an identical call."""
    inherited: bool = False
    """Whether the calls that a program makes get the value of the program's call."""
    adds_to_image: bool = False
    """Whether the value lists what is added to the image of the call's container, as wishes to the
    engine's `ImageMaker` (`sandbox/container/additions.py`)."""
    check: Callable[[Any, Any], None] | None = None
    """Called with a permitted call and its plan if the option's value is not the default. Raises
    EngineError if the value does not fit the call or the plan."""

    def of(self, options: object) -> V:
        """Return this option's value in a call's options, or the default if the options lack it."""
        value: V = getattr(options, self.name, self.default)
        return value


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a part adds to the command line. `after` is the command after which `--help`
    lists it.

    Typer makes the command from `function`. In a group of the kernel, `function` may also be a
    `Typer`, which becomes a subgroup and is listed after the group's commands.
    """

    help: str
    function: Named
    after: str
    takes_options: bool = False
    """Whether options that the command does not know are arguments, such as those of a program.
    Only for a command in a group of the kernel."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options that a part adds to a command of the kernel, before the parameter `before`.

    The parameters of `function` are the added options. `function` may also have parameters of the
    command, and then gets their values. `function` is called before the command, and may end the
    process instead of returning. If the command has a parameter `added`, this parameter gets the
    return value of `function`.
    """

    command: str
    function: Named
    before: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check that a part adds to `fumehood doctor`.

    `function` takes the configuration and yields `Finding`s. Without a `group`, the check belongs
    to the checks of authority and follows the check `after`. With a `group`, every user runs the
    check. Its findings are shown in a separate group with this title, which follows the group
    `after`.

    If `group` is `Limits`, which is a group of the kernel, the check reports the limits of the
    part's own wall. `name` then ends with a colon, and the names of the check's findings begin with
    it.
    """

    name: str
    function: Named
    after: str
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKind:
    """An executor that a part adds, and the properties of the tools that use it."""

    executor: Named
    """A subclass of `Executor` (`executors/base.py`)."""
    type: str | None = None
    """A `ToolType`, if another service runs the tools and only this executor calls them. The tools'
    definitions may come from outside the engine."""
    fields: frozenset[str] = frozenset()
    """Names from `registry.definitions.FIELDS` that definitions of this type may have."""
    is_builtin: bool = False
    """Whether only the product's own tools may name the executor."""
    streams: bool = False
    """Whether the executor can give a tool's result in parts."""
    place: str
    """Where the tools run, as text for people."""
    why: str
    """Why the tools run there, as text for people."""
    arguments: Named | None = None
    """A subclass of `Arguments` (`core/arguments.py`), if the engine runs the tools in a sandbox.
    It checks their definitions and calls, which are never retried, because they call no service."""
    output: Named | None = None
    """The output schema that the executor guarantees. A tool with this schema is not checked for
    it again."""
    recipient: str | None = None
    """The key in `Executor.sends`, as shown to approvers, whose value names the recipient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Everything that one part adds to the product. All fields except `name` are optional."""

    name: str
    after: tuple[str, ...] = ()
    """Names of the parts that come before this part, if they exist."""
    settings: Named | None = None
    """A mapping from configuration keys to `Setting`s."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands by name. The name `GROUP NAME` adds a command to a group of the kernel."""
    options: tuple[Options, ...] = ()
    """Options that the part adds to commands of the kernel."""
    gives: frozenset[str] = frozenset()
    """What programs get only from this part, as names from `needs_of` (`executors/around.py`)."""
    call_options: Named | None = None
    """A sequence of `CallOption`s."""
    checks: tuple[Check, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Installed libraries that it needs → the oldest version of each that is safe to use, such as
    `1.0.10`. `fumehood doctor` checks them."""
    approvers: Named | None = None
    """Takes the configuration, and returns the names of approvers that are not people."""
    operations: Named | None = None
    """A list of operations on the callers' socket. An operation with the method and address of one
    of the kernel's operations replaces it, and must need the same authority."""
    control_operations: Named | None = None
    """A list of operations on the control socket. The same rules apply as to `operations`."""
    exports: Mapping[str, Named] = field(default_factory=dict)
    """Export format for tools → a function that takes a definition and returns it in this
    format."""
    mounts: Mapping[str, Named] = field(default_factory=dict)
    """Path on the callers' socket → a function that takes the engine and returns an ASGI
    application."""
    handovers: Named | None = None
    """A list of `Handovers` (`http/peer.py`): requests on the callers' socket that get their
    connection as a whole."""
    session_fields: Mapping[str, Named] = field(default_factory=dict)
    """Name of a value that the part keeps with sessions (`SessionKeeper.keep`) → a function that
    takes the value and returns what the field of this name in `SessionRecord` shows. Only for the
    product's own parts, because the record's fields are the kernel's."""
    session_options: frozenset[str] = frozenset()
    """Names from `SESSION_OPTIONS`: options of new sessions and of presets that this part
    provides."""
    methods: Mapping[str, Named] = field(default_factory=dict)
    """Name of a public class of the product (`Engine`, a client) → a subclass of the kernel's class
    of that name, with the methods that the part adds. Only for the product's own parts, because
    type checkers must see these methods."""
    in_foreground: Named | None = None
    """Takes the configuration of a daemon in the foreground, and returns the configuration to
    use."""
    executors: Mapping[str, ToolKind] = field(default_factory=dict)
    """Name of an executor in definitions → the executor."""
    definitions: Named | None = None
    """Takes the document of a tool's definition, and yields its faults. A definition with faults is
    refused."""
    enforces: frozenset[str] = frozenset()
    """Names from `registry.definitions.RESTRICTIONS`: fields of tools' definitions that this part
    enforces."""
    policy: Mapping[str, Named] = field(default_factory=dict)
    """Key of the policy file, a plural → the type of its value: a tuple of models. The values of a
    policy are passed to `EnginePart.use_policy`."""
    excesses: frozenset[str] = frozenset()
    """Keys of rules in the policy. A rule with such a key matches if the gate of this part with the
    same key has an `Excess`."""
    conditions: Mapping[str, Named] = field(default_factory=dict)
    """Key of conditions in the policy → a subclass of `PartCondition` (`policy/model.py`). A rule
    itself may also have the key, which is then short for a condition in `when`."""
    coming: Named | None = None
    """Takes the configuration, and returns name prefixes of tools that are registered later. A
    policy may name such tools before they are registered."""
    states: Mapping[str, Named] = field(default_factory=dict)
    """Scheme of `state.url` → a subclass of `RemoteBackend` (`storage/backend.py`)."""
    files: Mapping[str, Named] = field(default_factory=dict)
    """Scheme of `files.url` → a subclass of `RemoteFiles` (`storage/files.py`)."""
    in_engine: Named | None = None
    """A subclass of `EnginePart` (`fumehood.engine_part`)."""


@contextmanager
def named_faults(what: str) -> Iterator[None]:
    """Convert any exception in the block to a PartError whose message begins with `what`.

    Exceptions that are already a `FumehoodError` are not converted.
    """
    try:
        yield
    except FumehoodError:
        raise
    except Exception as fault:
        raise PartError(f"{what}: {fault}") from fault


def ordered(found: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts in an order in which each part follows the parts in its `after`. Parts that
    need not follow each other are sorted by name.

    Raises:
        PartError: no such order exists.
    """
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
    """Import and return the object at `place`. Return the default if `place` is None."""
    return default if place is None else pkgutil.resolve_name(place)


def placed(kernel: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """Insert the keys of `added` into the names of `kernel`, and return all names in order. Each
    key follows the name that is its value.

    The value may also be another key of `added`. A key comes last if the name that it should follow
    does not exist.
    """
    names, left = list(kernel), dict(added)
    while left:
        name = next((name for name, after in left.items() if after in names), next(iter(left)))
        after = left.pop(name)
        names.insert(names.index(after) + 1 if after in names else len(names), name)
    return names
