"""Loading: the tools that an embedding program brings, all of them or none.

Host side, at the start of an engine. An embedding program is its own operator, so what it passes
needs no other permission.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.registry.declare import FunctionTool
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.functions import register_function
from fumehood.registry.index import Source, ToolIndex

Tool = FunctionTool | ToolDefinition | JsonObject


def register_all(registry: ToolIndex, tools: Iterable[Tool], private: Sequence[Path]) -> None:
    """Register an embedding program's tools. No function may lie in a `private` directory.

    Raises:
        InvalidDefinition: with every fault of every one.
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
    """Those of all sandboxed functions. Without any the jail is not started: functions come at
    the start only, and it would be memory that nobody uses.
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
