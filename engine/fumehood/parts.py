"""Find the parts of the product.

A part is an entry point in the group `fumehood.parts`. The kernel (the product without parts) never
imports a part directly: it calls `parts()`, and imports by name the objects that it uses. So a
command does not load the code of parts that it does not use, and if the files and the entry point
of a part are deleted, everything else still works.

Invariants: the order of parts is fixed (by `Part.after`, then by name; parts of other distributions
come last); two parts never add the same thing. A part of another distribution runs inside the
engine with all the engine's rights, so it is loaded only if the operator names it (`parts` in the
configuration file, or FUMEHOOD_PARTS).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import isfunction
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fumehood.core.json_types import JsonObject
from fumehood.core.part import (
    SESSION_OPTIONS,
    Named,
    Part,
    PartError,
    ToolKind,
    imported,
    ordered,
)
from fumehood.protocol.engine_paths import config_file, read_config_file

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fumehood.parts"
DISTRIBUTION = "fumehood"
VARIABLE = "FUMEHOOD_PARTS"

_SINGLE = (
    "commands", "checks", "exports", "mounts", "executors", "policy", "excesses", "conditions",
    "states", "files", "session_fields",
)  # fmt: skip
"""Fields of `Part` that contain names. Two parts must not have the same name in one of these
fields."""

T = TypeVar("T")


AUTO = "auto"
"""Value of `container.engine`: the first part that can run containers on this host."""


@cache
def parts() -> tuple[Part, ...]:
    """Return the parts of this distribution, followed by the parts of other distributions that the
    operator names.

    Raises:
        PartError: a part is missing or cannot be loaded, or two parts add the same thing.
    """
    made = own_parts()
    if chosen := named():
        others = [entry for entry in foreign() if entry.name in chosen]
        if missing := set(chosen) - {entry.name for entry in others}:
            raise PartError(
                f"No installed package has the part {min(missing)!r} that `parts` names."
            )
        loaded = _loaded(others)
        if any(part.methods for part in loaded):
            raise PartError("Only the product's own parts can add methods.")
        if any(part.session_fields for part in loaded):
            raise PartError("Only the product's own parts can fill fields of sessions.")
        made += loaded
    if len({part.name for part in made}) < len(made):
        raise PartError("A named part has the name of one of the product's own.")
    for kind in _SINGLE:
        _require_single(kind, made)
    return made


def own_parts() -> tuple[Part, ...]:
    """Return the parts of this distribution, in the order that `ordered` defines.

    Raises:
        PartError: a part cannot be loaded.
    """
    # Imported late: it takes a sixth of a command's time, and most commands use no part.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        own = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise PartError(
            "fumehood has no metadata here, so its parts cannot be found. Install it again."
        ) from None
    entries = own.entry_points.select(group=GROUP)
    if not entries:  # an older version was installed, and a gate could be missing
        raise PartError("fumehood's metadata names no parts. Install it again.")
    return _loaded(entries)


def with_methods(kernel: type[T]) -> type[T]:
    """Return a subclass of `kernel`, a core class such as `Engine`, that also has the methods that
    the product's own parts add to it. If no part adds a method, return the class itself.

    Raises:
        PartError: a part would replace an attribute of the core class or of another part's class.
    """
    added: list[type[T]] = []
    known = set(dir(kernel))
    for part in own_parts():
        if kernel.__name__ not in part.methods:
            continue
        added.append(imported(part.methods[kernel.__name__]))
        found = vars(added[-1]).items()
        names = {name for name, value in found if isfunction(value) or not name.startswith("__")}
        if again := sorted(names & known):
            raise PartError(f"{kernel.__name__}.{again[0]} of the part {part.name!r} exists.")
        known |= names
    return type(kernel.__name__, tuple(added), {}) if added else kernel


def tool_kinds() -> dict[str, ToolKind]:
    """Return the kinds of tools that parts add, as a dict from the name of an executor to the kind
    of its tools.
    """
    return {name: kind for part in parts() for name, kind in part.executors.items()}


def places(kind: Literal["states", "files"]) -> dict[str, Named]:
    """Return the storage classes that parts add. The result maps a URL scheme to the name of a
    class.

    If `kind` is `states`, the schemes are those of `state.url`. If it is `files`, they are those of
    `files.url`.
    """
    return {scheme: place for part in parts() for scheme, place in getattr(part, kind).items()}


def fields_of_parts(values: Mapping[str, JsonObject]) -> dict[str, Any]:
    """Return the fields that parts add to the record of a session, as a dict from name to value.

    `values` maps the name of each field to what a part has stored with the session. A field for
    which nothing was stored is None.
    """
    return {
        name: imported(place)(values[name]) if name in values else None
        for part in parts()
        for name, place in part.session_fields.items()
    }


def missing_options(wanted: object) -> list[str]:
    """Return the names of the options that `wanted` sets and that no part provides. `wanted` is a
    session or a preset.
    """
    given = {name for part in parts() for name in part.session_options}
    return [name for name in SESSION_OPTIONS if getattr(wanted, name) and name not in given]


def listed(names: Iterable[str]) -> str:
    """Return names in alphabetical order as one text for people, or "none" if there are no
    names.
    """
    return ", ".join(sorted(names)) or "none"


def coming(config: Any) -> list[str]:
    """Return the name prefixes of tools that parts may register after the start. `config` is the
    engine's configuration.
    """
    places = [part.coming for part in parts() if part.coming is not None]
    return [prefix for place in places for prefix in imported(place)(config)]


def named() -> tuple[str, ...]:
    """Return the names of the parts of other distributions that the operator wants to load, from an
    environment variable or from the setting `parts` of the configuration file.

    If neither can be read, the result is empty. `Config` later checks the setting and reports the
    fault.
    """
    given: Any = os.environ.get(VARIABLE)
    if not given:
        # Without any of these, the home directory is looked up over a socket, which the jail
        # forbids; and a sandboxed function's module may import the configuration.
        if not any(map(os.environ.get, ("FUMEHOOD_CONFIG", "XDG_CONFIG_HOME", "HOME"))):
            return ()
        try:
            document = read_config_file(config_file(os.environ))
        except (OSError, ValueError):
            return ()
        given = document.get("parts", ())
    given = split_names(given)
    return tuple(map(str, given)) if isinstance(given, list | tuple) else ()


def split_names(value: Any) -> Any:
    """Split a text at commas into names, because an environment variable cannot hold a list. Other
    values are returned unchanged.
    """
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return value


def foreign() -> list[EntryPoint]:
    """Return the entry points in the group `fumehood.parts` that belong to other distributions."""
    from importlib.metadata import entry_points

    found = [
        entry
        for entry in entry_points(group=GROUP)
        if entry.dist is not None and entry.dist.name != DISTRIBUTION
    ]
    return sorted(found, key=lambda entry: (entry.name, entry.value))


def _loaded(entries: Iterable[EntryPoint]) -> tuple[Part, ...]:
    """Load the parts of these entry points, and return them in the order that `ordered` defines."""
    found: dict[str, Part] = {}
    for entry in entries:
        part = _load(entry)
        if part.name != entry.name or part.name in found:
            raise PartError(f"The entry point {entry.name!r} names the part {part.name!r}.")
        found[part.name] = part
    return ordered(found.values())


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


def container_part(engine: str) -> Part | None:
    """Return the part that runs containers. `engine` is its name, or `AUTO`: the first one that
    fits this host or, if none does, the first one, which says why. Return None if `AUTO` is given,
    and no part runs containers.

    Raises:
        PartError: no such part runs containers. The message names those that do.
    """
    able = [part for part in parts() if part.runtime is not None]
    if engine == AUTO:
        fits = (part.runtime_fits is None or imported(part.runtime_fits)() for part in able)
        return next(compress(able, fits), able[0] if able else None)
    found = next((part for part in able if part.name == engine), None)
    if found is None:
        names = ", ".join([AUTO, *(part.name for part in able)])
        raise PartError(f"{engine[:80]!r} cannot run containers. Use one of {names}.")
    return found


def oci_runtime_of(engine: str) -> str | None:
    """Return the only OCI runtime that a runtime can use, or None if there are several. The
    argument and the errors are those of `container_part`.
    """
    part = container_part(engine)
    return None if part is None else part.oci_runtime


def runtime_of(engine: str) -> Any:
    """Return the function that creates what runs containers (`NewRuntime`), or None. The argument
    and the errors are those of `container_part`.
    """
    part = container_part(engine)
    return None if part is None else imported(part.runtime)
