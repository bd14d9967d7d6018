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
from fumehood.core.names import EXTERNAL, NET_TOOL, did_you_mean
from fumehood.core.tool import CODE_OUTPUT, EXPRESSION_OUTPUT, PROGRAM_OUTPUT, ToolDefinition
from fumehood.registry.definitions import InvalidDefinition, check_definition, parse_definition
from fumehood.registry.json_schema import CompiledSchema
from fumehood.registry.secrets import NO_SECRETS, SecretBindings


class Source(StrEnum):
    """Where a tool comes from. It limits the types of tools that are accepted."""

    BUILTIN = "builtin"
    ENTRY_POINT = "entry_point"
    PROGRAM = "program"
    DIRECTORY = "directory"
    API = "api"
    EXTERNAL = "external"
    """Not a registered tool: its caller runs it, and the engine only decides on calls."""
    MCP = "mcp"


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """A fully checked definition with compiled schemas.

    A function tool has either `function`, to be called in this process, or `address`, by which
    another process finds it.
    """

    definition: ToolDefinition
    source: Source
    arguments: CompiledSchema
    output: CompiledSchema | None
    function: HostFunction | None = None
    disabled_because: str | None = None
    address: FunctionAddress | None = None


def tool_of_document(
    document: Any, source: Source, secrets: SecretBindings = NO_SECRETS
) -> RegisteredTool:
    """Return a checked tool from outside the engine, not yet in an index.

    Its definition may refer to `secrets` that are bound to it.

    Raises:
        InvalidDefinition: the document has faults. The error lists all of them.
    """
    if isinstance(document, dict) and document.get("type") not in ("REST", "MCP"):
        fault = "type: only tools of type REST and MCP can come from outside the engine"
        raise InvalidDefinition(str(document.get("name", "")), [fault])
    definition = parse_definition(document)
    faults = secrets.faults(definition)
    if faults:
        raise InvalidDefinition(definition.name, faults)
    return _registered(definition, source)


class _Tools:
    """One state of the index: tools by name and version, and the preferred version of each name."""

    def __init__(self, tools: Iterable[RegisteredTool] = ()) -> None:
        self.by_name: dict[str, dict[str, RegisteredTool]] = {}
        for tool in tools:
            self.by_name.setdefault(tool.definition.name, {})[tool.definition.version] = tool
        self.preferred = {
            name: max(versions.values(), key=_preference) for name, versions in self.by_name.items()
        }
        self._names: list[str] | None = None

    def put(self, name: str, versions: dict[str, RegisteredTool]) -> None:
        """Set all versions of one name. Without versions, the name is removed."""
        if versions:
            self.by_name[name] = versions
            self.preferred[name] = max(versions.values(), key=_preference)
        else:
            self.by_name.pop(name, None)
            self.preferred.pop(name, None)
        self._names = None

    def all(self) -> Iterator[RegisteredTool]:
        """Iterate over all versions."""
        return (tool for versions in self.by_name.values() for tool in versions.values())

    def definitions(self) -> dict[str, ToolDefinition]:
        """All versions, by name and version."""
        return {f"{t.definition.name}@{t.definition.version}": t.definition for t in self.all()}

    @property
    def names(self) -> list[str]:
        """Every name in alphabetical order. Cached, so that lists need not sort."""
        if self._names is None:
            self._names = sorted(self.preferred)
        return self._names


class ToolIndex:
    """Tools by name and version. Their definitions may refer to these `secrets`.

    `external` returns the tool for a name that begins with `external:`, which is never registered.
    """

    def __init__(
        self,
        secrets: SecretBindings = NO_SECRETS,
        external: Callable[[str], RegisteredTool] | None = None,
        mcp_servers: Iterable[str] = (),
    ) -> None:
        self.secrets = secrets
        self.changes = 0
        """A counter that grows with every change, so that callers notice changes."""
        self._external = external
        self.coming = tuple((f"{server}__", "") for server in mcp_servers)
        """Prefixes of the tool names that MCP servers may list later, each with an empty version.

        A policy may name such tools, so its loader must not report them as unknown.
        """
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
            InvalidDefinition: the definition has faults, the version is already registered, the
                name is a built-in tool's, or a function is missing or not allowed.
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
        self._set(tool)
        return tool

    def put(self, tool: RegisteredTool) -> None:
        """Add or replace a checked version.

        Raises:
            InvalidDefinition: another source has this name.
        """
        self.require_free(tool.definition.name, tool.source)
        self._set(tool)

    def require_free(self, name: str, source: Source) -> None:
        """Require that no other source has this name. Raises InvalidDefinition."""
        owner = self.owner(name, but=source)
        if owner is not None:
            fault = f"name: {name} belongs to another source ({owner.value})"
            raise InvalidDefinition(name, [fault])

    def remove(self, name: str, version: str) -> None:
        """Remove one version."""
        versions = self._now.by_name.get(name, {})
        self._put(name, {v: tool for v, tool in versions.items() if v != version})

    def switch(self, name: str, version: str, *, is_active: bool) -> None:
        """Enable or disable a version. Does nothing if it is missing or already in that state."""
        tool = self.find(name, version)
        if tool is None or tool.definition.is_active is is_active:
            return
        definition = tool.definition.model_copy(update={"is_active": is_active})
        self._set(replace(tool, definition=definition))

    def find(self, name: str, version: str) -> RegisteredTool | None:
        """Return one version, or None."""
        return self._now.by_name.get(name, {}).get(version)

    def _set(self, tool: RegisteredTool) -> None:
        """Add or replace one version."""
        name, version = tool.definition.name, tool.definition.version
        self._put(name, {**self._now.by_name.get(name, {}), version: tool})

    def _put(self, name: str, versions: dict[str, RegisteredTool]) -> None:
        """Replace one name's versions, so that readers see all of the change or nothing."""
        self._now.put(name, versions)
        self.changes += 1

    def replace_source(self, source: Source, tools: Iterable[RegisteredTool]) -> None:
        """Replace all tools of a source at once.

        The caller guarantees that the tools have this source and distinct names and versions, and
        that no other source owns their names.
        """
        others = (tool for tool in self._now.all() if tool.source is not source)
        after = _Tools([*others, *tools])
        self.changes += after.definitions() != self._now.definitions()
        self._now = after

    def owner(self, name: str, *, but: Source) -> Source | None:
        """Return the source, other than `but`, that already has this name, or None."""
        versions = self._now.by_name.get(name, {}).values()
        return next((tool.source for tool in versions if tool.source is not but), None)

    def get(self, reference: str, *, names_others: bool = True) -> RegisteredTool:
        """Return the tool for a reference: `name@1.2.0`, or `name` for the preferred version.

        That is the newest version that is not deprecated, or else the newest one. `names_others`
        tells that the caller may see every tool, so that the error suggests similar names.

        Raises:
            ToolNotFound: no such name or version.
        """
        name, at, version = reference.partition("@")
        if self._external is not None and (reference.startswith(EXTERNAL) or name == NET_TOOL):
            return self._external(reference)
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
        """Return all versions of one name, newest first."""
        found = self._now.by_name.get(name, {}).values()
        return sorted(found, key=lambda tool: tool.definition.version_key, reverse=True)

    def __iter__(self) -> Iterator[RegisteredTool]:
        """Iterate over the preferred version of each name, sorted by name."""
        now = self._now
        return (now.preferred[name] for name in now.names)

    def page(
        self, accepts: Callable[[ToolDefinition], bool], after: str, limit: int
    ) -> tuple[list[RegisteredTool], int]:
        """Return one page of accepted tools, and the total number of accepted tools.

        The page has at most `limit` tools, whose names sort after `after`.
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
        if definition.name == NET_TOOL:
            faults.append("name: net is the name of requests that programs send")
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
    """Compile a checked definition to a registered tool."""
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
    """Return the compiled output schema, or None if the executor already guarantees it."""
    promised = definition.output_schema
    if promised is None or promised == _KEPT_BY_EXECUTOR.get(definition.executor):
        return None
    return CompiledSchema(promised)
