"""The index: every registered tool by name and version. In process, rebuilt at each start.

Host side, read by `call/resolve` and by the faces. Invariant: what stands in the index was
checked whole, and a name that a built-in tool has belongs to the built-in tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fumehood.model.call import HostFunction
from fumehood.model.errors import ToolNotFound
from fumehood.model.tool import EXPRESSION_OUTPUT, ToolDefinition
from fumehood.registry.definitions import InvalidDefinition, check_definition
from fumehood.registry.json_schema import CompiledSchema


class Source(StrEnum):
    """Who brought a tool, which decides what it may be."""

    BUILTIN = "builtin"
    ENTRY_POINT = "entry_point"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """A definition that passed every check, with what is needed to call it."""

    definition: ToolDefinition
    source: Source
    arguments: CompiledSchema
    output: CompiledSchema | None
    function: HostFunction | None = None
    disabled_because: str | None = None


class ToolIndex:
    """Tools by name and version."""

    def __init__(self) -> None:
        self._tools: dict[str, dict[str, RegisteredTool]] = {}
        self._preferred: dict[str, RegisteredTool] = {}

    def register(
        self,
        definition: ToolDefinition,
        source: Source,
        *,
        function: HostFunction | None = None,
        disabled_because: str | None = None,
    ) -> RegisteredTool:
        """Add one version of one tool.

        Raises:
            InvalidDefinition: the definition is wrong, is there already, has a function
                too few or too many, or takes a built-in tool's name.
        """
        faults = self._faults(definition, source, function)
        try:
            check_definition(definition)
        except InvalidDefinition as error:
            faults = [*error.faults, *faults]
        if faults:
            raise InvalidDefinition(definition.name, faults)
        tool = RegisteredTool(
            definition=definition,
            source=source,
            arguments=CompiledSchema(definition.parameters),
            output=_promise_to_check(definition),
            function=function,
            disabled_because=disabled_because,
        )
        versions = self._tools.setdefault(definition.name, {})
        versions[definition.version] = tool
        self._preferred[definition.name] = max(versions.values(), key=_preference)
        return tool

    def get(self, reference: str) -> RegisteredTool:
        """`name` (the newest version that is not deprecated, else the newest) or `name@1.2.0`.

        Raises:
            ToolNotFound: no such name or version.
        """
        name, at, version = reference.partition("@")
        versions = self._tools.get(name)
        if versions is None:
            raise ToolNotFound(
                f"There is no tool {name[:80]!r}. List the tools to see which exist."
            )
        if not at:
            return self._preferred[name]
        if version not in versions:
            known = ", ".join(sorted(versions))
            raise ToolNotFound(f"{name} has no version {version[:40]!r}; it has {known}.")
        return versions[version]

    def versions(self, name: str) -> list[RegisteredTool]:
        """All versions of one name, newest first."""
        found = self._tools.get(name, {}).values()
        return sorted(found, key=lambda tool: tool.definition.version_key, reverse=True)

    def __iter__(self) -> Iterator[RegisteredTool]:
        """The preferred version of each name, by name."""
        return (self._preferred[name] for name in sorted(self._preferred))

    def _faults(
        self, definition: ToolDefinition, source: Source, function: HostFunction | None
    ) -> list[str]:
        faults = []
        versions = self._tools.get(definition.name, {})
        if definition.version in versions:
            faults.append(f"name: {definition.name}@{definition.version} is registered already")
        elif source is not Source.BUILTIN and any(
            tool.source is Source.BUILTIN for tool in versions.values()
        ):
            faults.append(f"name: {definition.name} is a built-in tool and cannot be overridden")
        if (definition.executor == "function") != (function is not None):
            faults.append("executor: 'function' goes with a Python function, and only with one")
        if definition.type == "BUILTIN" and source is not Source.BUILTIN:
            faults.append("type: BUILTIN is for the tools that come with the engine")
        return faults


def _preference(tool: RegisteredTool) -> tuple[bool, tuple[Any, ...]]:
    return (not tool.definition.deprecated, tool.definition.version_key)


def _promise_to_check(definition: ToolDefinition) -> CompiledSchema | None:
    """The output schema, unless the executor keeps that very promise by itself."""
    promised = definition.output_schema
    if promised is None or (definition.executor == "expression" and promised == EXPRESSION_OUTPUT):
        return None
    return CompiledSchema(promised)
