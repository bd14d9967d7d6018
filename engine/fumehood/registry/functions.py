"""Functions as tools: which are called here, and which are found by another process.

Host side, for entry points and the embedding program alike. An asynchronous function with
`sandboxed=False` is awaited in this process. Everything else runs in another one, which
imports it: a sandboxed function in the jail, a synchronous one in a worker that can be
killed. A function of the started program (`__main__`) is sent there as source. Invariant:
nothing is ever pickled; what can be neither named as `module:name` nor sent is refused at
registration, with the cure.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fumehood.core.call import FunctionAddress
from fumehood.registry.declare import FunctionTool
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import RegisteredTool, Source, ToolIndex
from fumehood.registry.program_source import NotShippable, source_of
from fumehood.sandbox.process.jail import library_directories

TOO_WIDE = frozenset(
    map(Path, ("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/media", "/mnt", "/opt",
               "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var",  # noqa: S108
               "/var/lib", "/var/tmp"))  # noqa: S108
)  # fmt: skip
"""Directories of a host that are nobody's import path; showing one shows everybody's files."""

REMEDY = (
    "Define the function at the top level of an importable module; or, if you trust its code, "
    "make it async with sandboxed=False"
)
"""For each function that another process cannot find: an asynchronous one needs no other."""


def register_function(
    index: ToolIndex,
    tool: FunctionTool,
    source: Source,
    *,
    private: Sequence[Path],
    disabled_because: str | None = None,
) -> RegisteredTool:
    """Add a function to the index, in the form in which it will be called.

    `private` are directories that no import path of a sandboxed function may hold.

    Raises:
        InvalidDefinition: as `ToolIndex.register`, or the function cannot be found by
            another process though it must be.
    """
    definition = tool.definition
    if definition.executor != "function" or (tool.is_async and not definition.sandboxed):
        return index.register(
            definition, source, function=tool.invoke, disabled_because=disabled_because
        )
    try:
        address = address_of(tool)
        if definition.sandboxed and not address.source:
            _check_import_path(Path(address.import_path), private)
    except _NotFound as fault:
        raise InvalidDefinition(definition.name, [_fault(tool, str(fault))], REMEDY) from None
    return index.register(definition, source, address=address, disabled_because=disabled_because)


class _NotFound(Exception):
    """Why another process could not, or must not, import the function."""


def address_of(tool: FunctionTool) -> FunctionAddress:
    """Where another process finds the function.

    Raises:
        _NotFound: nowhere.
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
        return _sent(tool, name)
    return FunctionAddress(module_name, name, str(_import_path(module)))


def _sent(tool: FunctionTool, name: str) -> FunctionAddress:
    """The function as source. Another text is another module, however long a worker lives."""
    libraries = library_directories() if tool.definition.sandboxed else None
    try:
        source = source_of(tool.function, name, libraries)
    except NotShippable as reason:
        raise _NotFound(f"it stands in the program that was started, and {reason}") from None
    digest = hashlib.sha256("\0".join(source).encode()).hexdigest()
    return FunctionAddress(f"__main__#{digest}", name, "", source)


def _name_in(module: ModuleType, tool: FunctionTool) -> str:
    for name, value in vars(module).items():
        if value is tool:
            return name
    raise _NotFound(f"no name at the top level of {module.__name__} holds what @tool made")


def _import_path(module: ModuleType) -> Path:
    """The directory beneath which `import` finds the module by its full name."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    file = Path(origin) if isinstance(origin, str) else None
    if file is None or not file.is_file():
        raise _NotFound(f"{module.__name__} is not loaded from a file")
    parts = module.__name__.split(".")
    if hasattr(module, "__path__"):
        parts.append("__init__")
    directory = file.parent
    for part in reversed(parts[:-1]):
        if directory.name != part:
            raise _NotFound(f"its file does not lie where {module.__name__} says")
        directory = directory.parent
    if file.name.split(".")[0] != parts[-1]:
        raise _NotFound(f"its file does not lie where {module.__name__} says")
    return directory.resolve()


def _check_import_path(path: Path, private: Sequence[Path]) -> None:
    """The function can read all that lies beneath its import path."""
    resolved = [directory.resolve() for directory in private]
    if path in TOO_WIDE or any(directory.is_relative_to(path) for directory in resolved):
        raise _NotFound(
            "the directory of its module holds other things than code (the whole host, a home or "
            "the engine's own state), and a sandboxed function may read all of it; move the "
            "module into a directory of its own"
        )


def _fault(tool: FunctionTool, why: str) -> str:
    if tool.definition.sandboxed:
        return f"sandboxed: the function cannot be run in the jail: {why}"
    return (
        "executor: a synchronous function runs in a worker process, so that it can be stopped; "
        f"that cannot find it: {why}"
    )
