"""Discovery at the engine's start: the tools of installed packages and of an embedding program.

Host side. A package offers tools through the entry point `fumehood.tools`, which names a
`ToolDefinition`, a `FunctionTool`, or a list of these. Loading an entry point runs its package's
code, so only packages that the operator installed are found. Invariants: one faulty package does
not exclude the others; a tool that runs on the host (`sandboxed=False`) stays disabled until the
configuration names it. Tools of an embedding program need no permission. Either all of them are
registered, or none.

An asynchronous function with `sandboxed=False` is awaited in this process. Other functions run in a
process that imports them. A sandboxed function runs in the jail. A synchronous function with
`sandboxed=False` runs in a worker that can be killed. A function of the started program
(`__main__`, which is a script or the cells of a notebook) cannot be imported without running the
whole program again. Therefore, such a function is pickled by value, with the globals that it uses.
Invariants: pickles are only sent from the host to the other process, never back; a function that
can neither be imported nor pickled is refused at registration, and the error names a remedy.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fumehood.core.call import FunctionAddress
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import CURSOR, QUERY_PLACE, ToolDefinition, ToolType
from fumehood.registry.declare import FunctionTool
from fumehood.registry.definitions import InvalidDefinition, check_definition, parse_definition
from fumehood.registry.index import RegisteredTool, Source, ToolIndex
from fumehood.registry.settings import SearchSettings, WebToolSettings

TOO_WIDE = frozenset(
    map(Path, ("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/media", "/mnt", "/opt",
               "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var",  # noqa: S108
               "/var/lib", "/var/tmp"))  # noqa: S108
)  # fmt: skip
"""Directories that cannot be an import path, because the jail would expose all other files in these
directories."""

REMEDY = (
    "Define the function at the top level of an importable module; or, if you trust its code, "
    "make it async with sandboxed=False"
)
"""What a tool author can do if another process cannot find a function. Asynchronous functions can
run in this process."""

FETCH, SEARCH = "fetch_url", "search_web"
GROUP = "fumehood.tools"
BUILTIN_PACKAGE = "fumehood_tools"


@dataclass(frozen=True, slots=True)
class LoadFault:
    """The reason why a tool of an entry point was not registered."""

    entry_point: str
    reason: str


def discover(
    index: ToolIndex,
    host_tools: Sequence[str],
    found: Iterable[EntryPoint] | None = None,
    private: Sequence[Path] = (),
    web: WebToolSettings | None = None,
) -> list[LoadFault]:
    """Register the tools of all installed packages. Return the reasons why tools were not
    registered.

    `host_tools` are the names of tools that may run on the host. `found` are the entry points to
    load, by default all of the group `fumehood.tools`. The built-in web tools are disabled unless
    `web` enables them. A sandboxed function is refused if its import path contains a `private`
    directory.
    """
    faults: list[LoadFault] = []
    offered = list(found if found is not None else entry_points(group=GROUP))
    # Built-in tools first, so that no other source takes their names.
    for entry_point in sorted(offered, key=lambda e: (not _is_builtin(e), e.value)):
        try:
            offer = entry_point.load()
        except (
            Exception,
            SystemExit,
        ) as error:  # a package's own code can raise anything
            faults.append(LoadFault(entry_point.value, f"{type(error).__name__}: {error}"))
            continue
        for tool in offer if isinstance(offer, list | tuple) else [offer]:
            try:
                source = Source.BUILTIN if _is_builtin(entry_point) else Source.ENTRY_POINT
                if source is Source.BUILTIN and isinstance(tool, ToolDefinition):
                    definition, why = _configured(tool, web or WebToolSettings())
                    if why is None and definition is not tool:
                        check_definition(definition)  # it has settings of the operator
                    index.register(definition, source, disabled_because=why)
                else:
                    _register(index, tool, source, host_tools, private)
            except InvalidDefinition as error:
                faults.append(LoadFault(entry_point.value, error.message))
    return faults


def _configured(
    definition: ToolDefinition, settings: WebToolSettings
) -> tuple[ToolDefinition, str | None]:
    """Return the definition of a built-in tool, changed according to the operator's settings. Also
    return why the tool is disabled, or None if it is enabled.
    """
    if definition.name == FETCH and not settings.fetch_url:
        return _disabled(definition, "web.fetch_url = true")
    if definition.name != SEARCH:
        return definition, None
    if settings.search is None:
        return _disabled(definition, "web.search")
    return _with_service(definition, settings.search), None


def _disabled(definition: ToolDefinition, setting: str) -> tuple[ToolDefinition, str]:
    """Return the definition, marked as disabled, and the reason. The reason is a text that names
    the setting with which the operator can enable the tool. A disabled tool is shown in lists, but
    is not offered to models.
    """
    return definition.model_copy(update={"is_active": False}), (
        "It would give agents access to the network, and the configuration does not allow it; the "
        f"operator can set {setting}."
    )


def _with_service(definition: ToolDefinition, settings: SearchSettings) -> ToolDefinition:
    """Return the definition of the search tool, completed with the search service in the settings.
    Parameters that the service does not support are removed.
    """
    unknown = set()
    if "limit" not in QUERY_PLACE.findall(settings.endpoint):
        unknown.add("limit")
    if settings.response.cursor_parameter is None:
        unknown.add(CURSOR)
    known = definition.parameters["properties"]
    properties = {name: schema for name, schema in known.items() if name not in unknown}
    return definition.model_copy(
        update={
            "endpoint": settings.endpoint,
            "headers": settings.headers,
            "response": settings.response,
            "parameters": {**definition.parameters, "properties": properties},
        }
    )


def _register(
    index: ToolIndex, tool: Any, source: Source, host_tools: Sequence[str], private: Sequence[Path]
) -> None:
    if isinstance(tool, ToolDefinition):
        index.register(_only_native(tool), source)
    elif isinstance(tool, FunctionTool):
        definition = _only_native(tool.definition)
        named = definition.sandboxed or definition.name in host_tools
        why = None if named else (
            "It runs in the engine's own process, and the configuration does not allow it; "
            "the operator can add its name to host_tools."
        )  # fmt: skip
        register_function(index, tool, source, private=private, disabled_because=why)
    else:
        raise InvalidDefinition(
            type(tool).__name__, ["definition: neither a ToolDefinition nor made by @tool"]
        )


def _only_native(definition: ToolDefinition) -> ToolDefinition:
    if definition.type not in (ToolType.BUILTIN, ToolType.NATIVE):
        raise InvalidDefinition(
            definition.name, ["type: an entry point can offer only BUILTIN and NATIVE tools"]
        )
    return definition


def _is_builtin(entry_point: EntryPoint) -> bool:
    """Return whether an entry point belongs to the engine's own distribution. Other packages cannot
    pretend to be this distribution.
    """
    return entry_point.module.split(".")[0] == BUILTIN_PACKAGE and _is_own(entry_point.dist)


@cache  # reading a distribution's name parses all its metadata
def _is_own(distribution: Distribution | None) -> bool:
    return distribution is not None and distribution.name == "fumehood"


Tool = FunctionTool | ToolDefinition | JsonObject


def register_all(registry: ToolIndex, tools: Iterable[Tool], private: Sequence[Path]) -> None:
    """Register the tools of the program that embeds the engine. If a tool is invalid, raise an
    error, so that the engine does not start.

    A sandboxed function is refused if its import path contains a `private` directory.

    Raises:
        InvalidDefinition: a tool is invalid. The error lists all faults of this tool.
    """
    for tool in tools:
        if isinstance(tool, FunctionTool):
            register_function(registry, tool, Source.PROGRAM, private=private)
        else:
            definition = tool if isinstance(tool, ToolDefinition) else parse_definition(tool)
            registry.register(definition, Source.PROGRAM)


def import_paths(registry: ToolIndex) -> frozenset[str]:
    """Return the import paths of all sandboxed functions.

    If the result is empty, the engine does not start the jail, which is the sandbox for functions.
    It checks this once at its start, because functions are not registered later.
    """
    versions = (tool for name in registry for tool in registry.versions(name.definition.name))
    return frozenset(
        tool.address.import_path
        for tool in versions
        if tool.address is not None and tool.definition.sandboxed
    )


# -- functions ------------------------------------------------------------------------------


def register_function(
    index: ToolIndex,
    tool: FunctionTool,
    source: Source,
    *,
    private: Sequence[Path],
    disabled_because: str | None = None,
) -> RegisteredTool:
    """Add a tool that is a Python function to the index, and return it.

    An asynchronous function that is not sandboxed runs in this process. Any other function runs in
    another process, which finds it by its address. A sandboxed function is refused if its import
    path contains a `private` directory. `disabled_because` is the reason why the tool is disabled,
    or None.

    Raises:
        InvalidDefinition: `ToolIndex.register` refuses the definition, or the other process could
            not find the function.
    """
    definition = tool.definition
    if definition.executor != "function" or (tool.is_async and not definition.sandboxed):
        return index.register(
            definition, source, function=tool.invoke, disabled_because=disabled_because
        )
    try:
        address = address_of(tool)
        if definition.sandboxed and not address.pickled:
            _check_import_path(Path(address.import_path), private)
    except _NotFound as fault:
        raise InvalidDefinition(definition.name, [_fault(tool, str(fault))], REMEDY) from None
    return index.register(definition, source, address=address, disabled_because=disabled_because)


class _NotFound(Exception):
    """A function cannot be used as a tool, because another process cannot find it or must not be
    given access to its import path. The message gives the reason.
    """


def address_of(tool: FunctionTool) -> FunctionAddress:
    """Return the address by which another process finds a function. It contains the function's
    import path and name, or the function's pickle.

    Raises:
        _NotFound: the function can be neither imported nor pickled.
    """
    function = tool.function
    module_name = str(getattr(function, "__module__", None))
    qualified = str(getattr(function, "__qualname__", ""))
    if "<locals>" in qualified:
        raise _NotFound("it was made inside another function")
    module = sys.modules.get(module_name)
    if module is None:
        raise _NotFound(f"its module {module_name[:80]!r} is not loaded")
    name = _name_in(module, tool)
    if module_name in ("__main__", "__mp_main__"):
        return _pickled(tool, name)
    return FunctionAddress(module_name, name, str(_import_path(module)))


def _pickled(tool: FunctionTool, name: str) -> FunctionAddress:
    """Return an address that contains the tool's function itself, pickled by value in its current
    state. Raises _NotFound if the function cannot be pickled.
    """
    import cloudpickle  # few programs need it

    try:
        raw: bytes = cloudpickle.dumps(tool)
    except Exception as reason:  # any value that the function uses may raise
        raise _NotFound(f"it is part of the started program, and uses a value: {reason}") from None
    text = base64.b64encode(raw).decode("ascii")
    file = Path(inspect.unwrap(tool.function).__code__.co_filename)
    # Pickles of classes differ from process to process; the text of a script does not.
    digest = hashlib.sha256(file.read_bytes() if file.is_file() else raw).hexdigest()
    return FunctionAddress("__main__", name, "", text, digest)


def _name_in(module: ModuleType, tool: FunctionTool) -> str:
    for name, value in vars(module).items():
        if value is tool:
            return name
    raise _NotFound(f"no name at the top level of {module.__name__} holds what @tool made")


def _import_path(module: ModuleType) -> Path:
    """Return the directory from which `import` loads the module under its full name. Raises
    _NotFound if there is no such directory.
    """
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    file = Path(origin) if isinstance(origin, str) else None
    if file is None or not file.is_file():
        raise _NotFound(f"{module.__name__} is not loaded from a file")
    parts = module.__name__.split(".")
    if hasattr(module, "__path__"):
        parts.append("__init__")
    if [*file.parts[-len(parts) : -1], file.name.split(".")[0]] != parts:
        raise _NotFound(f"its file is not where the name {module.__name__} says")
    return file.parents[len(parts) - 1].resolve()


def _check_import_path(path: Path, private: Sequence[Path]) -> None:
    """Raise _NotFound if an import path is too broad or contains a private directory. A sandboxed
    function can read everything below its import path.
    """
    resolved = [directory.resolve() for directory in private]
    if path in TOO_WIDE or any(directory.is_relative_to(path) for directory in resolved):
        raise _NotFound(
            "the directory of its module contains more than code (the whole host, a home or "
            "the engine's own state), and a sandboxed function may read all of it; move the "
            "module into a directory of its own"
        )


def _fault(tool: FunctionTool, why: str) -> str:
    if tool.definition.sandboxed:
        return f"sandboxed: the function cannot be run in the jail: {why}"
    return (
        "executor: a synchronous function runs in a worker process, so that it can be stopped, "
        f"and the worker cannot find it: {why}"
    )
