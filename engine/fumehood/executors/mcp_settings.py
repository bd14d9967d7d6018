"""Settings of MCP servers whose tools become the engine's: `[mcp_servers.NAME]`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from fumehood.core.tool import SECRET_REFERENCE

SEPARATOR = "__"
"""Between the name of a server and that of its tool. No name of a server has it."""

ServerName = Annotated[
    str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*$", max_length=24)
]


class McpServerSettings(BaseModel):
    """One server: a program, or an address.

    A program runs in a container of `image` unless `place` is "host", which only the operator can
    say. Every tool is dangerous that is not named in `harmless`: what a server says of its own
    tools is not believed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: tuple[Annotated[str, Field(max_length=32_768)], ...] = ()
    url: str | None = None
    env: dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], SecretStr] = Field(
        default_factory=dict
    )
    headers: dict[str, str] = Field(default_factory=dict)
    """Of requests to `url`; `${secret:NAME}` for secrets that are bound to the server's name."""
    place: Literal["container", "host"] = "container"
    image: str = "python"
    memory_mb: Literal[128, 256, 512, 1024, 2048] = 256
    """Of the container."""
    harmless: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bool(self.command) is (self.url is not None):
            raise ValueError("a server needs one of `command` and `url`")
        given = self.model_fields_set
        foreign = given & (
            {"env", "place", "image", "memory_mb"} if self.url is not None else {"headers"}
        )
        if self.place == "host":
            foreign |= given & {"image", "memory_mb"}
        if foreign:
            raise ValueError(f"{', '.join(sorted(foreign))}: does not fit this kind of server")
        if self.url is None:
            return self
        from fumehood.registry.definitions import header_faults, url_faults  # with its libraries

        faults = list(url_faults(self.url))
        for name, value in self.headers.items():
            faults += header_faults(name, value)
        if SECRET_REFERENCE.search(self.url):
            faults.append("url: a secret can stand in a header only")
        if faults:
            raise ValueError("; ".join(faults))
        return self


AllMcpServers = dict[ServerName, McpServerSettings]
