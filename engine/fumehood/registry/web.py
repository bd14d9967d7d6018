"""The built-in tools of the web, as the operator's configuration makes them.

Host side, used by `discover`. An agent with `fetch_url` can send data to any host that the tool
may reach, in the address alone; what it searches for with `search_web` goes to one service.
Invariant: without configuration both are disabled.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fumehood.core.tool import CURSOR, QUERY_PLACE, ResponseMapping, ToolDefinition
from fumehood.registry.secrets import HostPattern

FETCH, SEARCH = "fetch_url", "search_web"
HIT = frozenset({"title", "url", "snippet"})


class SearchSettings(BaseModel):
    """The service that `search_web` queries, and the location of hits in its JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str
    headers: dict[str, str] = Field(default_factory=dict)
    response: ResponseMapping

    @model_validator(mode="after")
    def _has_hits(self) -> Self:
        if self.response.items is None or set(self.response.fields or {}) != HIT:
            raise ValueError(
                "`response` needs `items`, and `fields` with title, url and snippet, no others"
            )
        return self


class WebSettings(BaseModel):
    """What agents may read of the web."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fetch_url: bool = False
    allowed_hosts: tuple[HostPattern, ...] = ()
    """Hosts that `fetch_url` may reach although their addresses are not public."""
    only_hosts: tuple[HostPattern, ...] | None = None
    """The only hosts that it may reach. None: every one with public addresses; empty: none."""
    search: SearchSettings | None = None


def configured(
    definition: ToolDefinition, settings: WebSettings
) -> tuple[ToolDefinition, str | None]:
    """A built-in tool as the operator has configured it, and why it is disabled, if it is."""
    if definition.name == FETCH and not settings.fetch_url:
        return _disabled(definition, "web.fetch_url = true")
    if definition.name != SEARCH:
        return definition, None
    if settings.search is None:
        return _disabled(definition, "web.search")
    return _search(definition, settings.search), None


def _disabled(definition: ToolDefinition, setting: str) -> tuple[ToolDefinition, str]:
    """Lists then show it as disabled, and no model is offered it."""
    return definition.model_copy(update={"is_active": False}), (
        "It would give agents access to the network, and the configuration does not allow it; the "
        f"operator can set {setting}."
    )


def _search(definition: ToolDefinition, settings: SearchSettings) -> ToolDefinition:
    """The tool for a service, without the parameters that the service does not know."""
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


__all__ = ["SearchSettings", "WebSettings", "configured"]
