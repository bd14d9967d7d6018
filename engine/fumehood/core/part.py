"""Parts: features that can be deleted, and what each part adds to the kernel (the product without
parts).

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
"""The place of an object: `package.module:name`. The module is imported when the object is used."""


class PartError(FumehoodError):
    """A part cannot be used.

    The engine then does not start, because a missing part might mean a missing check of calls.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration key of a part: the type of its value, and the default value."""

    type: Any
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOption(Generic[V]):
    """An option that a part adds to calls. The engine itself only stores the option's value and
    passes it to the part.
    """

    name: str
    type: Any
    default: V
    decides: bool = True
    """Whether the option changes what the call does. If so, an idempotency key, an approval and a
    remembered rule apply only to calls with the same value of the option. If the value is not the
    default, the call is never answered with the result of an identical call."""
    inherited: bool = False
    """Whether the calls that a program makes get the value of the program's call."""
    adds_to_image: bool = False
    """Whether the value lists additions to the image of the call's container. The engine's
    `ImageMaker` makes the additions (`sandbox/container/additions.py`)."""
    check: Callable[[Any, Any], None] | None = None
    """A function that takes a permitted call and its plan. It is called if the option's value is
    not the default, and raises EngineError if the value does not fit the call or the plan."""

    def of(self, options: object) -> V:
        """Return this option's value in a call's options, or the default if the options lack it."""
        value: V = getattr(options, self.name, self.default)
        return value


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a part adds to the command line.

    Typer makes the command from `function`. In a built-in group, `function` may also be a `Typer`.
    It then becomes a subgroup, which is listed after the group's commands. `--help` lists the new
    command after the command that `after` names.
    """

    help: str
    function: Named
    after: str
    takes_options: bool = False
    """Whether unknown options count as arguments, such as those of a program that the command runs.
    Only a command in a built-in group may set this field."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options that a part adds to a built-in command.

    `command` names the command. Each parameter of `function` becomes an option of the command. The
    options come before the command's own parameter that `before` names.

    If the command already has a parameter of the same name, no option is added. `function` then
    gets the value of the command's parameter.

    `function` is called before the command, and may end the process instead of returning. If the
    command has a parameter `added`, it gets a list of what the functions of all parts returned.
    """

    command: str
    function: Named
    before: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check that a part adds to `fumehood doctor`.

    `function` takes the configuration and yields `Finding`s. The name of each is `name`, or begins
    with `name` and a colon. `group` is the title of the group in which the findings are shown. If
    `group` is given, every user runs the check.

    If `group` is None, the findings are shown in the built-in group `Authority`, after the findings
    of the check that `after` names. If `group` is a new group, this group is shown after the group
    that `after` names.

    If `group` is the built-in group `Limits`, the check reports the limits of the part's own wall.
    Its `name` must then end with a colon, and the name of each finding must begin with `name`.
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
    """A `ToolType`, if another service runs the tools and only this executor calls them. The
    definitions of such tools may come from outside the engine. Otherwise None."""
    fields: frozenset[str] = frozenset()
    """Names from `registry.definitions.FIELDS` that definitions of this `type` may have."""
    is_builtin: bool = False
    """Whether only the product's own tools may name the executor."""
    streams: bool = False
    """Whether the executor can give a tool's result in parts."""
    place: str
    """A text for people that says where the tools run."""
    why: str
    """A text for people that says why the tools run there."""
    arguments: Named | None = None
    """A subclass of `Arguments` (`core/arguments.py`) if the engine runs the tools in a sandbox,
    otherwise None. It checks the tools' definitions and calls. These calls are never retried,
    because they call no service."""
    output: Named | None = None
    """The output schema that the executor guarantees. If a tool has exactly this schema, the engine
    does not check the tool's results."""
    recipient: str | None = None
    """The key in `Executor.sends` under which approvers see the recipient of a call's data, or
    None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Everything that one part adds to the product. All fields except `name` are optional."""

    name: str
    after: tuple[str, ...] = ()
    """Names of the parts that come before this part, if they exist."""
    settings: Named | None = None
    """A mapping from each configuration key to its `Setting`."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands by name. The name `GROUP NAME` adds a command to a built-in group."""
    options: tuple[Options, ...] = ()
    """Options that the part adds to built-in commands."""
    gives: frozenset[str] = frozenset()
    """What programs get only from this part. The names are those that `needs_of` returns
    (`executors/around.py`)."""
    call_options: Named | None = None
    """A sequence of `CallOption`s."""
    checks: tuple[Check, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Maps each installed library that the part needs to its oldest safe version, such as `1.0.10`.
    `fumehood doctor` checks the versions."""
    approvers: Named | None = None
    """A function that takes the configuration, and returns the names of approvers that are not
    people."""
    operations: Named | None = None
    """A list of operations on the callers' socket. If an operation has the method and address of a
    built-in operation, it replaces the built-in operation and must need the same authority."""
    control_operations: Named | None = None
    """A list of operations on the control socket. The rules are the same as for `operations`."""
    exports: Mapping[str, Named] = field(default_factory=dict)
    """Maps an export format for tools to a function that takes a definition and returns it in this
    format."""
    mounts: Mapping[str, Named] = field(default_factory=dict)
    """Maps a path on the callers' socket to a function that takes the engine and returns an ASGI
    application."""
    handovers: Named | None = None
    """A list of `Handovers` (`http/peer.py`). Each describes requests on the callers' socket that
    take over their whole connection."""
    session_fields: Mapping[str, Named] = field(default_factory=dict)
    """Maps the name of a value that the part keeps with sessions (`SessionKeeper.keep`) to a
    function. The function takes the value, and returns what the field of this name in
    `SessionRecord` shows. Only the product's own parts may use this, because the record's fields
    are not defined by parts."""
    session_options: frozenset[str] = frozenset()
    """Names from `SESSION_OPTIONS`: options of new sessions and of presets that this part
    provides."""
    methods: Mapping[str, Named] = field(default_factory=dict)
    """Maps the name of a public class of the product (`Engine`, a client) to a subclass of the core
    class with that name. The subclass has the methods that the part adds. Only for the product's
    own parts, because type checkers must see these methods."""
    in_foreground: Named | None = None
    """A function that takes the configuration of a daemon in the foreground, and returns the
    configuration to use."""
    executors: Mapping[str, ToolKind] = field(default_factory=dict)
    """Maps the name of an executor, as in definitions, to the executor's `ToolKind`."""
    definitions: Named | None = None
    """A function that takes the document of a tool's definition, and yields its faults. A
    definition with faults is refused."""
    enforces: frozenset[str] = frozenset()
    """Names from `registry.definitions.RESTRICTIONS`: fields of tools' definitions that this part
    enforces."""
    policy: Mapping[str, Named] = field(default_factory=dict)
    """Maps a key of the policy file, a plural, to the type of its value: a tuple of models. The
    values of a policy are passed to `EnginePart.use_policy`."""
    excesses: frozenset[str] = frozenset()
    """Keys that rules of the policy may have because of this part. A rule with such a key matches
    if the part's gate (check before a call) with the same key would refuse the call now
    (`Excess`)."""
    conditions: Mapping[str, Named] = field(default_factory=dict)
    """Maps a key of conditions in the policy to a subclass of `PartCondition` (`policy/model.py`).
    If a rule itself has the key, this is short for the same condition in `when`."""
    coming: Named | None = None
    """A function that takes the configuration, and returns name prefixes of tools that are
    registered later. A policy may name such tools before they are registered."""
    states: Mapping[str, Named] = field(default_factory=dict)
    """Maps a scheme of `state.url` to a subclass of `RemoteBackend` (`storage/backend.py`)."""
    files: Mapping[str, Named] = field(default_factory=dict)
    """Maps a scheme of `files.url` to a subclass of `RemoteFiles` (`storage/files.py`)."""
    runtime: Named | None = None
    """A function that creates what runs the engine's containers (`NewRuntime` in
    `sandbox/container/runtime.py`). The setting `container.engine` names the part whose function is
    used."""
    runtime_fits: Named | None = None
    """A function that returns whether this host can run containers in this way. It is called if
    `container.engine` is `auto`. Without it, every host can."""
    oci_runtime: str | None = None
    """The name of the only OCI runtime that `runtime` can use, if it has just one. The setting
    `container.runtime` then has this value."""
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
    """Return the parts in `found` in an order in which each part comes after the parts that its
    `after` names. Parts that need not follow each other are sorted by name.

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


def part_among(parts: Iterable[object], kind: type[V]) -> V:
    """Return the instance of `kind` among `parts`. Raises PartError if there is none."""
    found = next((part for part in parts if isinstance(part, kind)), None)
    if found is None:
        raise PartError(f"This needs the part {kind.__name__}, which is not there.")
    return found


def placed(kernel: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """Insert names into a list of names, and return the new list.

    The names in `kernel` keep their order. `added` maps each new name to the name that it must
    follow. This is a name in `kernel` or another new name. If it is neither, the new name comes
    last.
    """
    names, left = list(kernel), dict(added)
    while left:
        name = next((name for name, after in left.items() if after in names), next(iter(left)))
        after = left.pop(name)
        names.insert(names.index(after) + 1 if after in names else len(names), name)
    return names
