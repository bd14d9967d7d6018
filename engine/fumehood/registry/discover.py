"""Discovery at the start: tools of installed packages and of an embedding program.

Host side. A package offers tools through the entry point `fumehood.tools`, which names a
`ToolDefinition`, a `FunctionTool`, or a list of these. Loading one runs its package's code, so only
packages that the operator installed are found. Invariants: one faulty package does not exclude the
others; host code (`sandboxed=False`) stays disabled until the configuration names it. An embedding
program is its own operator: its tools need no permission, and are registered all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.registry.declare import FunctionTool
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.functions import register_function
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.web import WebSettings, configured

GROUP = "fumehood.tools"
BUILTIN_PACKAGE = "fumehood_tools"


@dataclass(frozen=True, slots=True)
class LoadFault:
    """An entry point whose tools were left out, and the reason."""

    entry_point: str
    reason: str


def discover(
    index: ToolIndex,
    host_tools: Sequence[str],
    found: Iterable[EntryPoint] | None = None,
    private: Sequence[Path] = (),
    web: WebSettings | None = None,
) -> list[LoadFault]:
    """Register every offered tool; returns the failures.

    Tools of the web are disabled unless `web` enables them. `private` are directories that no
    import path of a sandboxed function may contain.
    """
    faults: list[LoadFault] = []
    offered = list(found if found is not None else entry_points(group=GROUP))
    is_own = cache(_is_own)  # the name is parsed anew each time, from the whole metadata
    # Built-in tools first, so that no other source takes their names.
    for entry_point in sorted(offered, key=lambda e: (not _is_builtin(e, is_own), e.value)):
        try:
            tools = _as_list(entry_point.load())
        except (
            Exception,
            SystemExit,
        ) as error:  # a package's own code: anything can come out of it
            faults.append(LoadFault(entry_point.value, f"{type(error).__name__}: {error}"))
            continue
        for tool in tools:
            try:
                is_builtin = _is_builtin(entry_point, is_own)
                source = Source.BUILTIN if is_builtin else Source.ENTRY_POINT
                if source is Source.BUILTIN and isinstance(tool, ToolDefinition):
                    definition, why = configured(tool, web or WebSettings())
                    index.register(definition, source, disabled_because=why)
                else:
                    _register(index, tool, source, host_tools, private)
            except InvalidDefinition as error:
                faults.append(LoadFault(entry_point.value, error.message))
    return faults


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


def _is_builtin(entry_point: EntryPoint, is_own: Callable[[Distribution | None], bool]) -> bool:
    """Whether it belongs to the engine's own distribution; other packages cannot claim that."""
    return entry_point.module.split(".")[0] == BUILTIN_PACKAGE and is_own(entry_point.dist)


def _is_own(distribution: Distribution | None) -> bool:
    return distribution is not None and distribution.name == "fumehood"


def _as_list(offered: Any) -> list[Any]:
    return list(offered) if isinstance(offered, list | tuple) else [offered]


Tool = FunctionTool | ToolDefinition | JsonObject


def register_all(registry: ToolIndex, tools: Iterable[Tool], private: Sequence[Path]) -> None:
    """Register an embedding program's tools. No function may be in a `private` directory.

    Raises:
        InvalidDefinition: with every fault of every tool.
    """
    faults: list[InvalidDefinition] = []
    for tool in tools:
        try:
            if isinstance(tool, FunctionTool):
                register_function(registry, tool, Source.PROGRAM, private=private)
            else:
                definition = tool if isinstance(tool, ToolDefinition) else _parse(tool)
                registry.register(definition, Source.PROGRAM)
        except InvalidDefinition as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise InvalidDefinition.of_several(faults)


def import_paths(registry: ToolIndex) -> frozenset[str]:
    """The import paths of all sandboxed functions. Without any, the jail is not started, because
    functions come only at the start, and it would waste memory.
    """
    versions = (tool for name in registry for tool in registry.versions(name.definition.name))
    return frozenset(
        tool.address.import_path
        for tool in versions
        if tool.address is not None and tool.definition.sandboxed
    )


def _parse(document: object) -> ToolDefinition:
    if not isinstance(document, dict):
        fault = "definition: neither made by @tool nor a definition"
        name = getattr(document, "__name__", type(document).__name__)
        raise InvalidDefinition(str(name), [fault])
    return parse_definition(document)
