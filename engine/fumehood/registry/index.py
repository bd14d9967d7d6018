"""The index: every registered tool by name and version. It is in memory, and is built at each
start.

Host side, used by `pipeline/resolve` and the public interfaces. Invariants: every tool in the index
was fully checked (built-in tools are checked by the test suite instead of at the start); no other
source can use the name of a built-in tool; readers see either all or none of a change of a source's
tools; a call continues with the `RegisteredTool` that it resolved, even if the index changes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from fumehood.core.call import FunctionAddress, HostFunction
from fumehood.core.errors import InvalidParams, ToolNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.names import EXTERNAL, EXTERNAL_NAME_PATTERN, NET_TOOL, did_you_mean
from fumehood.core.pages import MAX_PAGE
from fumehood.core.part import imported
from fumehood.core.tool import (
    CODE_OUTPUT,
    DECISION,
    NET_EXECUTOR,
    SHELL_OUTPUT,
    ToolDefinition,
    ToolType,
)
from fumehood.parts import tool_kinds
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.registry.definitions import (
    InvalidDefinition,
    check_definition,
    parse_definition,
    remote_types,
)
from fumehood.registry.json_schema import CompiledSchema
from fumehood.registry.secrets import NO_SECRETS, SecretBindings
from fumehood.registry.settings import ExternalToolSettings


class Source(StrEnum):
    """The origin of a tool, which limits the types that the tool can have. If a part registered the
    tool, the part's name is used instead of one of these values.
    """

    BUILTIN = "builtin"
    ENTRY_POINT = "entry_point"
    PROGRAM = "program"
    DIRECTORY = "directory"
    API = "api"
    EXTERNAL = "external"
    """The tool is not registered. Its caller runs the tool, and the engine only decides on the
    tool's calls."""


class Service(Protocol):
    """A service that runs tools which a part has registered."""

    def bound(self) -> JsonObject:
        """Return the settings of the service that determine what a call does. If one of these
        settings changes, approvals that were given before are no longer valid. Approvers see only
        some of these settings.
        """


@dataclass(frozen=True, slots=True)
class RegisteredTool:
    """A tool with a fully checked definition and compiled schemas.

    `output` is the schema that results must be checked against, or None. If the tool is a function,
    it has either `function`, which is called in this process, or `address`, by which another
    process finds the function. `disabled_because` is the reason why the tool is disabled, or None.
    """

    definition: ToolDefinition
    source: str
    """A `Source`, or the name of a part."""
    arguments: CompiledSchema
    output: CompiledSchema | None
    function: HostFunction | None = None
    disabled_because: str | None = None
    address: FunctionAddress | None = None
    service: Service | None = field(default=None, compare=False)
    """The service that the executor calls for this tool. It is set by the part that registered the
    tool, never by a definition."""


def tool_of_document(
    document: Any, source: str, secrets: SecretBindings = NO_SECRETS
) -> RegisteredTool:
    """Check the definition of a tool that comes from outside the engine, and return the tool. The
    tool is not added to an index. `source` says where the tool comes from (see `Source`).

    The definition may refer only to those `secrets` that are bound to the tool.

    Raises:
        InvalidDefinition: the document has faults. The error lists all of them.
    """
    types = tuple(remote_types())
    if isinstance(document, dict) and document.get("type") not in types:
        named = " and ".join(types) or "none"
        fault = f"type: only tools of type {named} can come from outside the engine"
        raise InvalidDefinition(str(document.get("name", "")), [fault])
    definition = parse_definition(document)
    faults = secrets.faults(definition)
    if faults:
        raise InvalidDefinition(definition.name, faults)
    return _registered(definition, source)


class ToolIndex:
    """All registered tools by name and version. Their definitions may refer to the secrets in
    `secrets`.

    The function `external` returns the tools that are never registered. These are the external
    tools, whose names begin with `external:` and which run outside the engine, and the tool `net`,
    which represents network requests of programs. `coming` are prefixes of the names of tools that
    may be registered later.
    """

    def __init__(
        self,
        secrets: SecretBindings = NO_SECRETS,
        external: Callable[[str], RegisteredTool] | None = None,
        coming: Iterable[str] = (),
    ) -> None:
        self.secrets = secrets
        self.changes = 0
        """The number of changes of the index. Other code compares this number with an earlier one
        to detect changes."""
        self._external = external
        self.coming = tuple((prefix, "") for prefix in coming)
        """Prefixes of the tool names that may be registered later, each with an empty version.

        A policy may name such tools, so its loader must not report them as unknown.
        """
        self._by_name: dict[str, dict[str, RegisteredTool]] = {}
        self._preferred: dict[str, RegisteredTool] = {}
        self._names: list[str] | None = None

    def register(
        self,
        definition: ToolDefinition,
        source: Source,
        *,
        function: HostFunction | None = None,
        disabled_because: str | None = None,
        address: FunctionAddress | None = None,
    ) -> RegisteredTool:
        """Check one version of a tool, add it to the index, and return it.

        `function` or `address` must be given if the tool is a Python function (see
        `RegisteredTool`). The definition of a built-in tool is not checked here, because the test
        suite checks all built-in tools.

        Raises:
            InvalidDefinition: the definition has faults, the version is already registered, the
                name belongs to a built-in tool, or the function is missing or not allowed.
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
        """Add a version of a tool that was already checked. If the version exists, it is replaced.

        Raises:
            InvalidDefinition: another source has a tool with this name.
        """
        self.require_free(tool.definition.name, tool.source)
        self._set(tool)

    def require_free(self, name: str, source: str) -> None:
        """Raise InvalidDefinition if a source other than `source` has a tool with this name."""
        owner = self.owner(name, but=source)
        if owner is not None:
            fault = f"name: {name} belongs to another source ({owner})"
            raise InvalidDefinition(name, [fault])

    def remove(self, name: str, version: str) -> None:
        """Remove one version of a tool. The version must exist."""
        versions = self._by_name[name]
        self._put(name, {v: tool for v, tool in versions.items() if v != version})

    def switch(self, name: str, version: str, *, is_active: bool) -> None:
        """Enable or disable one version of a tool. Does nothing if the version is missing or
        already in the wanted state.
        """
        tool = self.find(name, version)
        if tool is None or tool.definition.is_active is is_active:
            return
        definition = tool.definition.model_copy(update={"is_active": is_active})
        self._set(replace(tool, definition=definition))

    def find(self, name: str, version: str) -> RegisteredTool | None:
        """Return this version of the tool, or None if there is no such version."""
        return self._by_name.get(name, {}).get(version)

    def _set(self, tool: RegisteredTool) -> None:
        """Add a version of a tool. If the version exists, it is replaced."""
        name, version = tool.definition.name, tool.definition.version
        self._put(name, {**self._by_name.get(name, {}), version: tool})

    def _put(self, name: str, versions: dict[str, RegisteredTool]) -> None:
        """Replace all versions of the tool `name` with the given ones. If none are given, remove
        the name.
        """
        if versions:
            self._by_name[name] = versions
            self._preferred[name] = max(versions.values(), key=_preference)
        else:
            del self._by_name[name], self._preferred[name]
        self._names = None
        self.changes += 1

    def replace_source(self, source: str, tools: Iterable[RegisteredTool]) -> None:
        """Replace all tools of a source at once, so that readers see either all old or all new
        tools.

        The caller guarantees that all of the new tools have this source, that their names and
        versions are distinct, and that no other source has a tool with one of their names.
        """
        after = {
            name: versions
            for name, versions in self._by_name.items()
            if all(tool.source != source for tool in versions.values())
        }
        for tool in tools:
            after.setdefault(tool.definition.name, {})[tool.definition.version] = tool
        self._by_name = after
        self._preferred = {
            name: max(versions.values(), key=_preference) for name, versions in after.items()
        }
        self._names = None
        self.changes += 1

    def owner(self, name: str, *, but: str) -> str | None:
        """Return the source that already has a tool with this name. The source `but` is ignored.
        Return None if no other source has such a tool.
        """
        versions = self._by_name.get(name, {}).values()
        return next((tool.source for tool in versions if tool.source != but), None)

    def get(self, reference: str, *, names_others: bool = True) -> RegisteredTool:
        """Return the tool for a reference: `name@1.2.0`, or `name` for the preferred version.

        The preferred version is the newest version that is not deprecated or, if all versions are
        deprecated, the newest version. If `names_others` is True, an error suggests similar names.
        Only a caller that may see every tool should get such suggestions.

        Raises:
            ToolNotFound: there is no tool with this name, or no such version.
        """
        name, at, version = reference.partition("@")
        if self._external is not None and (reference.startswith(EXTERNAL) or name == NET_TOOL):
            return self._external(reference)
        versions = self._by_name.get(name)
        if versions is None:
            near = did_you_mean(name, self._sorted()) if names_others else ""
            raise ToolNotFound(
                f"There is no tool {name[:80]!r}.{near} List the tools to see which exist."
            )
        if not at:
            return self._preferred[name]
        if version not in versions:
            known = ", ".join(sorted(versions))
            raise ToolNotFound(f"{name} has no version {version[:40]!r}; it has {known}.")
        return versions[version]

    def versions(self, name: str) -> list[RegisteredTool]:
        """Return all versions of a tool, newest first. The list is empty if there is no tool with
        this name.
        """
        found = self._by_name.get(name, {}).values()
        return sorted(found, key=lambda tool: tool.definition.version_key, reverse=True)

    def __iter__(self) -> Iterator[RegisteredTool]:
        """Iterate over all tools, sorted by name. Each tool is in its preferred version."""
        return iter([self._preferred[name] for name in self._sorted()])

    def _sorted(self) -> list[str]:
        """Return the names of all tools in alphabetical order. The list is cached, because lists of
        tools are requested often.
        """
        if self._names is None:
            self._names = sorted(self._preferred)
        return self._names

    def _faults(
        self,
        definition: ToolDefinition,
        source: Source,
        function: HostFunction | FunctionAddress | None,
    ) -> list[str]:
        faults = []
        if definition.name == NET_TOOL:
            faults.append("name: net is the name of requests that programs send")
        versions = self._by_name.get(definition.name, {})
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
    source: str,
    function: HostFunction | None = None,
    disabled_because: str | None = None,
    address: FunctionAddress | None = None,
) -> RegisteredTool:
    """Return a registered tool with compiled schemas. The definition must already be checked."""
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


def _promise_to_check(definition: ToolDefinition) -> CompiledSchema | None:
    """Return the compiled output schema that results must be checked against. Return None if no
    check is needed, because the tool has no output schema or its executor guarantees the output
    schema.
    """
    promised = definition.output_schema
    if promised is None or promised == _guaranteed_by(definition.executor):
        return None
    return CompiledSchema(promised)


_OF_PROGRAMS: Mapping[str, JsonObject] = MappingProxyType(
    {
        language.executor: CODE_OUTPUT if language.has_value else SHELL_OUTPUT
        for language in LANGUAGES.values()
    }
)


def _guaranteed_by(executor: str) -> JsonObject | None:
    if executor in _OF_PROGRAMS:
        return _OF_PROGRAMS[executor]
    kind = tool_kinds().get(executor)
    output: JsonObject | None = imported(kind.output, None) if kind is not None else None
    return output


# -- external tools ------------------------------------------------------------------------


ANY_ARGUMENTS: JsonObject = {"type": "object", "additionalProperties": True}


class ExternalTools:
    """The external tools of one configuration. Callers run these tools themselves, and the engine
    only decides on the calls. The object also contains the tool `net`, which represents network
    requests of programs. Call the object with a reference to get the tool.

    `declared` maps names without the prefix `external:` to settings. Other external tools get the
    default settings.
    """

    def __init__(self, declared: Mapping[str, ExternalToolSettings]) -> None:
        self._declared = {name: _made(name, settings) for name, settings in declared.items()}
        self._other = lru_cache(lambda name: _made(name, ExternalToolSettings()))

    def __call__(self, reference: str) -> RegisteredTool:
        """Return the tool for `external:NAME`, `external:NAME@VERSION` or `net`. Each external tool
        has only one version.

        Raises:
            ToolNotFound: the name is invalid, or there is no such version.
        """
        if reference.partition("@")[0] == NET_TOOL:
            return NET
        name, _, version = reference.removeprefix(EXTERNAL).partition("@")
        if not re.fullmatch(EXTERNAL_NAME_PATTERN, name):
            raise ToolNotFound(f"No tool can have the name {reference[:80]!r}. Do not retry.")
        tool = self._declared.get(name) or self._other(name)
        if version not in ("", tool.definition.version):
            raise ToolNotFound(f"{EXTERNAL}{name} has no version {version[:40]!r}.")
        return tool


def _made(name: str, settings: ExternalToolSettings) -> RegisteredTool:
    definition = ToolDefinition(
        name="external", parameters=ANY_ARGUMENTS, sandboxed=False, **dict(settings)
    )
    # Skips validation, because a definition's pattern for names refuses `external:`.
    own = {"id": f"{EXTERNAL}{name}@{definition.version}", "name": f"{EXTERNAL}{name}",
           "executor": DECISION}  # fmt: skip
    return RegisteredTool(
        definition.model_copy(update=own), Source.EXTERNAL, CompiledSchema(ANY_ARGUMENTS), None
    )


NET = RegisteredTool(
    ToolDefinition(
        name=NET_TOOL,
        version="1.0.0",
        description="Send a request that a program in a sandbox has made.",
        parameters=ANY_ARGUMENTS,
        dangerous=True,
        sandboxed=False,
    ).model_copy(update={"executor": NET_EXECUTOR}),
    Source.EXTERNAL,
    CompiledSchema(ANY_ARGUMENTS),
    None,
)
"""The tool that represents a program's network request on which a human decides. Only the gateway
makes calls of this tool."""


# -- lists ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """A filter for a list of tools. A field that is None accepts every tool. Any other value must
    match exactly.
    """

    category: str | None = None
    tag: str | None = None
    type: ToolType | None = None

    def accepts(self, tool: ToolDefinition) -> bool:
        """Return whether a tool matches all fields of the filter."""
        return (
            (self.category is None or tool.category == self.category)
            and (self.tag is None or self.tag in tool.tags)
            and (self.type is None or tool.type == self.type)
        )

    @property
    def listing(self) -> str:
        """A text that identifies the list of tools that this filter accepts. It is used to check
        that a cursor belongs to this list.
        """
        return "tools" + strict_json.dumps([self.category, self.tag, self.type]).decode()


@dataclass(frozen=True, slots=True)
class ToolPage:
    """One page of a list of tools. `total_count` counts the tools on all pages."""

    tools: list[RegisteredTool]
    next_cursor: str | None
    total_count: int

    @property
    def pagination(self) -> JsonObject:
        """The value of the field `data.pagination` in the envelope."""
        return {
            "has_more": self.next_cursor is not None,
            "next_cursor": self.next_cursor,
            "total_count": self.total_count,
        }


def page_of_tools(
    index: ToolIndex,
    cursors: Cursors,
    principal_id: str,
    *,
    filter_by: ToolFilter,
    limit: int,
    cursor: str | None,
) -> ToolPage:
    """Return one page of the tools that the filter accepts. Each tool is in its preferred version.

    Raises:
        InvalidParams: the limit is out of range, or the cursor belongs to another list or
            principal.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidParams(f"limit must be from 1 to {MAX_PAGE}.", fields=["limit"])
    listing = filter_by.listing
    after = "" if cursor is None else cursors.read(cursor, listing, principal_id)
    found = [tool for tool in index if filter_by.accepts(tool.definition)]
    start = bisect_right(found, after, key=lambda tool: tool.definition.name)
    tools = found[start : start + limit]
    following = None
    if len(found) > start + limit:
        following = cursors.make(listing, principal_id, tools[-1].definition.name)
    return ToolPage(tools, following, len(found))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that is left out of a list, and the reason. If there are several reasons, this is the
    first that was found.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The result of `filter_tools`: the chosen tools in their original order, and the tools that
    were left out.
    """

    tools: tuple[ToolDefinition, ...]
    left_out: tuple[LeftOut, ...]


def filter_tools(
    tools: Iterable[ToolDefinition],
    *,
    categories: Collection[str] | None = None,
    exclude_dangerous: bool = True,
    max_cost: Decimal | None = None,
    at_most: int | None = None,
) -> Selection:
    """Choose at most `at_most` of the tools, and keep their order.

    If `categories` is None, every category is allowed. If it is empty, no tool is chosen.
    `max_cost` is the highest allowed `cost_per_use`. Disabled tools are never chosen.
    """
    kept: list[ToolDefinition] = []
    left_out: list[LeftOut] = []
    for tool in tools:
        reason = _reason_against(tool, categories, exclude_dangerous, max_cost)
        if reason is None and at_most is not None and len(kept) >= at_most:
            reason = f"more than {at_most} tools"
        if reason is None:
            kept.append(tool)
        else:
            left_out.append(LeftOut(tool.name, reason))
    return Selection(tuple(kept), tuple(left_out))


def _reason_against(
    tool: ToolDefinition,
    categories: Collection[str] | None,
    exclude_dangerous: bool,
    max_cost: Decimal | None,
) -> str | None:
    if not tool.is_active:
        return "it is disabled"
    if exclude_dangerous and tool.dangerous:
        return "it is dangerous"
    if categories is not None and tool.category not in categories:
        return f"its category is {tool.category or 'none'}"
    if max_cost is not None and tool.cost_per_use > max_cost:
        return f"it costs {tool.cost_per_use} a use"
    return None
