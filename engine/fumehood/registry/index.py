"""The index: every registered tool by name and version. In memory, rebuilt at each start.

Host side, used by `pipeline/resolve` and the faces. Invariants: every tool in the index was fully
checked, the built-in ones by a test; names of built-in tools are reserved for them. Readers see the
tools of a source before or after a change, never half of it; a call keeps the `RegisteredTool` that
it resolved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from fumehood.core.call import FunctionAddress, HostFunction
from fumehood.core.errors import ToolNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, did_you_mean
from fumehood.core.tool import CODE_OUTPUT, EXPRESSION_OUTPUT, PROGRAM_OUTPUT, ToolDefinition
from fumehood.registry.definitions import InvalidDefinition, check_definition, parse_definition
from fumehood.registry.json_schema import CompiledSchema
from fumehood.registry.secrets import NO_SECRETS, SecretBindings


class Source(StrEnum):
    """The source of a tool. It limits the types of tools that are accepted."""

    BUILTIN = "builtin"
    ENTRY_POINT = "entry_point"
    PROGRAM = "program"
    DIRECTORY = "directory"
    API = "api"
    EXTERNAL = "external"
    """Not a registered tool: its caller runs it."""
    MCP = "mcp"


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """A fully checked definition, compiled for its calls.

    A function is called in this process (`function`) or found by another one (`address`).
    """

    definition: ToolDefinition
    source: Source
    arguments: CompiledSchema
    output: CompiledSchema | None
    function: HostFunction | None = None
    disabled_because: str | None = None
    address: FunctionAddress | None = None


def tool_of_document(
    document: JsonObject, source: Source, secrets: SecretBindings = NO_SECRETS
) -> RegisteredTool:
    """A checked tool without a function, not yet in an index. It may refer to these `secrets`.

    Raises:
        InvalidDefinition: with every fault of the document.
    """
    definition = parse_definition(document)
    faults = secrets.faults(definition)
    if faults:
        raise InvalidDefinition(definition.name, faults)
    return _registered(definition, source)


class _Tools:
    """An immutable state: tools by name and version, and the preferred version of each name."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, RegisteredTool]] = {}
        self.preferred: dict[str, RegisteredTool] = {}
        self._names: list[str] | None = None

    def add(self, tool: RegisteredTool) -> None:
        name = tool.definition.name
        self.by_name.setdefault(name, {})[tool.definition.version] = tool
        before = self.preferred.get(name)
        if before is None or _preference(tool) > _preference(before):
            self.preferred[name] = tool
        if before is None:
            self._names = None

    def put(self, name: str, versions: dict[str, RegisteredTool]) -> None:
        """Set all versions of one name; empty removes the name."""
        if versions:
            self.by_name[name] = versions
            self.preferred[name] = max(versions.values(), key=_preference)
        else:
            self.by_name.pop(name, None)
            self.preferred.pop(name, None)
        self._names = None

    def definitions(self) -> dict[str, ToolDefinition]:
        """All versions, by name and version."""
        tools = [tool for versions in self.by_name.values() for tool in versions.values()]
        return {f"{t.definition.name}@{t.definition.version}": t.definition for t in tools}

    @property
    def names(self) -> list[str]:
        """Every name in order. Sorted at each change, not at each list."""
        if self._names is None:
            self._names = sorted(self.preferred)
        return self._names


class ToolIndex:
    """Tools by name and version. Their definitions may refer to these `secrets`.

    `external` makes the tools that are not registered, from names that begin with `external:`.
    """

    def __init__(
        self,
        secrets: SecretBindings = NO_SECRETS,
        external: Callable[[str], RegisteredTool] | None = None,
        mcp_servers: Iterable[str] = (),
    ) -> None:
        self.secrets = secrets
        self.changes = 0
        """Grows with every change."""
        self._external = external
        self.coming = tuple((f"{server}__", "") for server in mcp_servers)
        """Prefixes of the names of MCP servers' tools, in the form that the policy loader takes."""
        self._now = _Tools()

    def register(
        self,
        definition: ToolDefinition,
        source: Source,
        *,
        function: HostFunction | None = None,
        disabled_because: str | None = None,
        address: FunctionAddress | None = None,
    ) -> RegisteredTool:
        """Add one version of one tool.

        The definition of a built-in tool is not checked: a test checks them all.

        Raises:
            InvalidDefinition: the definition is wrong, already registered, has a missing or
                superfluous function, or uses a built-in tool's name.
        """
        faults = self._faults(definition, source, function or address)
        try:
            if source is not Source.BUILTIN:
                check_definition(definition)
        except InvalidDefinition as error:
            faults = [*error.faults, *faults]
        else:
            faults += self.secrets.faults(definition)
        if faults:
            raise InvalidDefinition(definition.name, faults)
        tool = _registered(definition, source, function, disabled_because, address)
        self._now.add(tool)
        self.changes += 1
        return tool

    def put(self, tool: RegisteredTool) -> None:
        """Add or replace a checked version.

        Raises:
            InvalidDefinition: another source has this name.
        """
        name, version = tool.definition.name, tool.definition.version
        self.require_free(name, tool.source)
        self._rebuild(name, lambda versions: versions.update({version: tool}))

    def require_free(self, name: str, source: Source) -> None:
        """Raises InvalidDefinition if another source has this name."""
        owner = self.owner(name, but=source)
        if owner is not None:
            fault = f"name: {name} belongs to another source ({owner.value})"
            raise InvalidDefinition(name, [fault])

    def remove(self, name: str, version: str) -> None:
        """Remove one version."""
        self._rebuild(name, lambda versions: versions.pop(version, None))

    def switch(self, name: str, version: str, *, is_active: bool) -> None:
        """Enable or disable a version, if it exists and that is a change."""
        tool = self.find(name, version)
        if tool is None or tool.definition.is_active is is_active:
            return
        definition = tool.definition.model_copy(update={"is_active": is_active})
        switched = replace(tool, definition=definition)
        self._rebuild(name, lambda versions: versions.update({version: switched}))

    def find(self, name: str, version: str) -> RegisteredTool | None:
        """One version, if it exists."""
        return self._now.by_name.get(name, {}).get(version)

    def _rebuild(self, name: str, change: Callable[[dict[str, RegisteredTool]], object]) -> None:
        """Replace one name's versions, so that readers see all of the change or nothing."""
        versions = dict(self._now.by_name.get(name, {}))
        change(versions)
        self._now.put(name, versions)
        self.changes += 1

    def replace_source(self, source: Source, tools: Iterable[RegisteredTool]) -> None:
        """Replace all tools of a source at once.

        The tools are of this source, each name and version once, and `owner` finds no other source
        for their names.
        """
        after = _Tools()
        for versions in self._now.by_name.values():
            for tool in versions.values():
                if tool.source is not source:
                    after.add(tool)
        for tool in tools:
            after.add(tool)
        self.changes += after.definitions() != self._now.definitions()
        self._now = after

    def owner(self, name: str, *, but: Source) -> Source | None:
        """The source that already has this name, apart from one source."""
        versions = self._now.by_name.get(name, {}).values()
        return next((tool.source for tool in versions if tool.source is not but), None)

    def get(self, reference: str, *, names_others: bool = True) -> RegisteredTool:
        """`name` (the newest version that is not deprecated, else the newest) or `name@1.2.0`.

        With `names_others` the caller may see every tool, so a refusal suggests similar names.

        Raises:
            ToolNotFound: no such name or version.
        """
        if self._external is not None and reference.startswith(EXTERNAL):
            return self._external(reference)
        name, at, version = reference.partition("@")
        versions = self._now.by_name.get(name)
        if versions is None:
            near = did_you_mean(name, self._now.names) if names_others else ""
            raise ToolNotFound(
                f"There is no tool {name[:80]!r}.{near} List the tools to see which exist."
            )
        if not at:
            return self._now.preferred[name]
        if version not in versions:
            known = ", ".join(sorted(versions))
            raise ToolNotFound(f"{name} has no version {version[:40]!r}; it has {known}.")
        return versions[version]

    def versions(self, name: str) -> list[RegisteredTool]:
        """All versions of one name, newest first."""
        found = self._now.by_name.get(name, {}).values()
        return sorted(found, key=lambda tool: tool.definition.version_key, reverse=True)

    def __iter__(self) -> Iterator[RegisteredTool]:
        """The preferred version of each name, by name."""
        now = self._now
        return (now.preferred[name] for name in now.names)

    def page(
        self, accepts: Callable[[ToolDefinition], bool], after: str, limit: int
    ) -> tuple[list[RegisteredTool], int]:
        """At most `limit` accepted tools whose names come after `after`, and how many there are.

        The count includes accepted tools before `after`.
        """
        now = self._now
        accepted = [name for name in now.names if accepts(now.preferred[name].definition)]
        start = bisect_right(accepted, after)
        return [now.preferred[name] for name in accepted[start : start + limit]], len(accepted)

    def _faults(
        self,
        definition: ToolDefinition,
        source: Source,
        function: HostFunction | FunctionAddress | None,
    ) -> list[str]:
        faults = []
        versions = self._now.by_name.get(definition.name, {})
        if definition.version in versions:
            faults.append(f"name: {definition.name}@{definition.version} is already registered")
        elif source is not Source.BUILTIN and any(
            tool.source is Source.BUILTIN for tool in versions.values()
        ):
            faults.append(f"name: {definition.name} is a built-in tool and cannot be overridden")
        if (definition.executor == "function") != (function is not None):
            faults.append("executor: 'function' goes with a Python function, and only with one")
        if definition.type == "BUILTIN" and source is not Source.BUILTIN:
            faults.append("type: BUILTIN is for the tools that come with the engine")
        return faults


def _registered(
    definition: ToolDefinition,
    source: Source,
    function: HostFunction | None = None,
    disabled_because: str | None = None,
    address: FunctionAddress | None = None,
) -> RegisteredTool:
    """Make a registered tool from a checked definition."""
    return RegisteredTool(
        definition=definition,
        source=source,
        arguments=CompiledSchema(definition.parameters),
        output=_promise_to_check(definition),
        function=function,
        disabled_because=disabled_because,
        address=address,
    )


def _preference(tool: RegisteredTool) -> tuple[bool, tuple[Any, ...]]:
    return (not tool.definition.deprecated, tool.definition.version_key)


_KEPT_BY_EXECUTOR = {
    "expression": EXPRESSION_OUTPUT,
    "restricted_python": PROGRAM_OUTPUT,
    "code:python": CODE_OUTPUT,
}


def _promise_to_check(definition: ToolDefinition) -> CompiledSchema | None:
    """The output schema, unless the executor guarantees that schema itself."""
    promised = definition.output_schema
    if promised is None or promised == _KEPT_BY_EXECUTOR.get(definition.executor):
        return None
    return CompiledSchema(promised)
