"""Data classes for the operator's settings of external tools and of the built-in web tools.

An agent with the tool `fetch_url` can send data to any host that the tool may reach, at least as a
part of the URL. The queries of the tool `search_web` go to one service. Invariant: without
configuration, both tools are disabled.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fumehood.core.names import EXTERNAL_NAME_PATTERN
from fumehood.core.tool import Money, ResponseMapping
from fumehood.registry.secrets import HostPattern, Settings

HIT = frozenset({"title", "url", "snippet"})
"""The fields of a search result."""


class ExternalToolSettings(Settings):
    """The operator's settings of one external tool. The caller runs such a tool itself."""

    dangerous: bool = True
    description: str = Field(
        default="A tool that the caller runs itself.", min_length=1, max_length=10_000
    )
    cost_per_use: Money = Field(default=0, validate_default=True)
    rate_limit: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _is_enforced(self) -> Self:
        # Imported late, because commands that read the configuration need no JSON Schema.
        from fumehood.registry.definitions import unenforced

        if faults := list(unenforced(dict(self))):
            raise ValueError(faults[0])
        return self


AllExternalTools = dict[Annotated[str, Field(pattern=EXTERNAL_NAME_PATTERN)], ExternalToolSettings]


class SearchSettings(Settings):
    """The operator's settings of `search_web`: the service that it queries, and where the search
    results are in the service's JSON.
    """

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


class WebToolSettings(Settings):
    """The operator's settings of the built-in web tools. They determine what agents may read on the
    web.
    """

    fetch_url: bool = False
    allowed_hosts: tuple[HostPattern, ...] = ()
    """Hosts that `fetch_url` may reach although their addresses are not public."""
    only_hosts: tuple[HostPattern, ...] | None = None
    """The only hosts that `fetch_url` may reach. None allows all public addresses. An empty list
    allows no host."""
    search: SearchSettings | None = None
