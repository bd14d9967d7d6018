"""The operator's settings for MCP servers whose tools the engine calls: `[mcp_servers.NAME]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from fumehood.core.part import Setting
from fumehood.core.tool import SECRET_REFERENCE, NetworkPatterns
from fumehood.core.value import Value
from fumehood.redaction.redactor import MIN_SECRET_CHARACTERS

if TYPE_CHECKING:
    from fumehood.config import KernelConfig

SEPARATOR = "__"
"""Separates the name of a server from the tool's own name, in the engine's name of a tool. No
server name contains it.
"""

ServerName = Annotated[
    str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*$", max_length=24)
]


class McpServerSettings(Value):
    """The operator's settings for one MCP server, which is either a program (`command`) or has a
    `url`.

    A program runs in a container of `image`, or on the host if `place` is "host". Every tool that
    is not in `harmless` counts as dangerous, whatever the server says.
    """

    command: tuple[Annotated[str, Field(max_length=32_768)], ...] = ()
    url: str | None = None
    env: dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], SecretStr] = Field(
        default_factory=dict
    )
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of the requests to `url`. `${secret:NAME}` stands for a secret that is bound to the
    name of the server.
    """
    place: Literal["container", "host"] = "container"
    image: str = "python"
    memory_mb: Literal[128, 256, 512, 1024, 2048] = 256
    """Memory of the program's container in MB."""
    network: NetworkPatterns = ()
    """Hosts that the program in its container may reach through the gateway."""
    harmless: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bool(self.command) is (self.url is not None):
            raise ValueError("a server needs one of `command` and `url`")
        given = self.model_fields_set
        foreign = given & (
            {"env", "place", "image", "memory_mb", "network"}
            if self.url is not None
            else {"headers"}
        )
        if self.place == "host":
            foreign |= given & {"image", "memory_mb", "network"}
        if foreign:
            raise ValueError(f"{', '.join(sorted(foreign))}: does not fit this kind of server")
        # The import is here because it loads large libraries.
        from fumehood.registry.definitions import header_faults, is_credential_name, url_faults

        for name, secret in self.env.items():
            if is_credential_name(name) and len(secret) < MIN_SECRET_CHARACTERS:
                raise ValueError(f"env: {name} has fewer than {MIN_SECRET_CHARACTERS} characters")
        if self.url is None:
            return self
        faults = list(url_faults(self.url))
        for name, value in self.headers.items():
            faults += header_faults(name, value)
        if SECRET_REFERENCE.search(self.url):
            faults.append("url: a secret can stand in a header only")
        if faults:
            raise ValueError("; ".join(faults))
        return self


AllMcpServers = dict[ServerName, McpServerSettings]

SETTINGS = {"mcp_servers": Setting(AllMcpServers, {})}


def coming(config: KernelConfig) -> list[str]:
    """Return, for each configured MCP server, the prefix with which the engine's names of the
    server's tools begin. The tools are registered later.
    """
    return [f"{name}{SEPARATOR}" for name in config.of("mcp_servers", dict) or {}]
