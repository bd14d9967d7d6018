"""External tools, `external:NAME`: their callers run them, the engine decides on their calls.

Host side; the operator may declare them in the configuration. Invariants: a tool that is not
declared is dangerous; whatever its name, it is never one of the registered tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from fumehood.core.errors import ToolNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, EXTERNAL_NAME_PATTERN, NET_TOOL
from fumehood.core.tool import DECISION, NET_EXECUTOR, ToolDefinition
from fumehood.registry.index import RegisteredTool, Source
from fumehood.registry.json_schema import CompiledSchema
from fumehood.registry.settings import ExternalToolSettings

ANY_ARGUMENTS: JsonObject = {"type": "object", "additionalProperties": True}


class ExternalTools:
    """The external tools of one configuration. Calling the object looks one up."""

    def __init__(self, declared: Mapping[str, ExternalToolSettings]) -> None:
        self._declared = {name: _made(name, settings) for name, settings in declared.items()}
        self._other = lru_cache(lambda name: _made(name, ExternalToolSettings()))

    def __call__(self, reference: str) -> RegisteredTool:
        """Return the tool for `external:NAME` or `external:NAME@VERSION` (there is one version),
        or for `net`.

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
"""A request of a program that a human decides on. Only the gateway calls it."""
