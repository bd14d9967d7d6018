"""Configuration: a file and the environment, read once at start into one frozen value.

Each feature's settings are in its folder, in `settings.py`; here they are combined with those of
the engine as a whole.

The environment wins over the file (`FUMEHOOD_CONFIG`, else `config.toml` under
`$XDG_CONFIG_HOME/fumehood`). Invariant: absent means the safe default, an unknown key is
an error, and nothing here changes while the engine runs.

| setting | absent | empty | filled |
|---|---|---|---|
| `host_tools` | no function runs in the host process | the same | exactly these may |
| `tcp` | callers use the socket only | the same | also this loopback address, with a token |
| `tools_directory` | no tools from files | the same | the definitions in this directory |
| `images_directory` | `images` in the state directory | the same | recipes of own images |
| `result_checkers` | results are not checked | the same | by these of installed packages |
| `allow_debug` | no `debug_info` | – | for calls that ask for it |
| `policy_file` | dangerous tools ask, others are allowed | – | also the rules in this file |
| `budgets` | no limits on spending | the same | each one limits the calls that it covers |
| `rest.allowed_hosts` | REST tools reach public addresses | the same | also these hosts |
| `secrets` | no definition can refer to a secret | the same | to these, for their tools and hosts |
| `web.fetch_url` | `fetch_url` is disabled | – | `true`: agents can read the web |
| `web.only_hosts` | every host with public addresses | no host | these alone |
| `web.search` | `search_web` is disabled | – | it asks this service |
| `cache` | 64 MB of results, each for 300 s | the same | these bounds; `max_mb = 0`: none |
| `rate_limits` | only those of definitions | the same | each one limits the calls that it covers |
| `external_tools` | tools of others are dangerous | the same | except as these say |
| `mcp_servers` | no tools of MCP servers | the same | the tools of these |
| `alerts` | the five thresholds of the mission | the same | these thresholds |
| `webhook` | no messages about approvals | – | messages to this address; `may_decide`: decisions |
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode, SettingsConfigDict

from fumehood.approvals.settings import ApprovalSettings, WebhookSettings
from fumehood.audit.model import AuditSettings
from fumehood.budgets.settings import AllBudgets, AllRateLimits
from fumehood.cache.model import CacheSettings
from fumehood.circuits.settings import CircuitSettings
from fumehood.core.names import did_you_mean
from fumehood.core.usage import Prices
from fumehood.executors.mcp_settings import AllMcpServers
from fumehood.identity.model import AllPrincipals
from fumehood.observe.settings import AlertSettings
from fumehood.protocol.sockets import ConfigError as ConfigError
from fumehood.protocol.sockets import ServiceConfig as ServiceConfig
from fumehood.protocol.sockets import SocketSettings, require_named_file
from fumehood.protocol.sockets import config_file as config_file
from fumehood.redaction.redactor import RedactionSettings
from fumehood.registry.secrets import AllSecrets, RestSettings
from fumehood.registry.settings import AllExternalTools, WebSettings
from fumehood.sandbox.settings import (
    ContainerSettings,
    InterpreterSettings,
    JailSettings,
    SessionSettings,
)


class Config(SocketSettings):
    """Everything an operator can set."""

    model_config = SettingsConfigDict(extra="forbid")

    tcp: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    allow_debug: bool = False
    host_tools: Annotated[tuple[str, ...], NoDecode] = ()
    tools_directory: Path | None = None
    images_directory: Path | None = None
    drain_seconds: float = Field(default=10, ge=0, le=600)
    calls_kept_days: int = Field(default=30, ge=1, le=3650)
    calls_kept: int = Field(default=100_000, ge=100, le=100_000_000)
    blobs_kept_hours: float = Field(default=24, gt=0, le=24 * 365)
    blobs_kept_mb: int = Field(default=1024, ge=1, le=1_000_000)
    streams_mb: int = Field(default=2048, ge=1, le=1_000_000)
    streams_kept_minutes: float = Field(default=15, ge=0, le=24 * 60)
    interpreter: InterpreterSettings = InterpreterSettings()
    jail: JailSettings = JailSettings()
    container: ContainerSettings = ContainerSettings()
    sessions: SessionSettings = SessionSettings()
    prices: Prices = Prices()
    environment: str = Field(default="production", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    policy_file: Path | None = None
    approvals: ApprovalSettings = ApprovalSettings()
    budgets: AllBudgets = ()
    cache: CacheSettings = CacheSettings()
    circuits: CircuitSettings = CircuitSettings()
    rate_limits: AllRateLimits = ()
    audit: AuditSettings = AuditSettings()
    webhook: WebhookSettings | None = None
    alerts: AlertSettings = AlertSettings()
    principals: AllPrincipals = ()
    result_checkers: Annotated[tuple[str, ...], NoDecode] = ()
    redaction: RedactionSettings = RedactionSettings()
    rest: RestSettings = RestSettings()
    secrets: AllSecrets = Field(default_factory=dict)
    web: WebSettings = WebSettings()
    external_tools: AllExternalTools = Field(default_factory=dict)
    mcp_servers: AllMcpServers = Field(default_factory=dict)

    @field_validator("host_tools", "result_checkers", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """Split names at commas: variables have no lists."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("tcp")
    @classmethod
    def _refuse_other_hosts(cls, value: str | None) -> str | None:
        """Refuse an address that another machine could reach."""
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65_536
        if not is_port or not _is_loopback(host):
            raise ValueError("must be a loopback address with its port, such as 127.0.0.1:8321")
        return value

    @field_validator("tools_directory", "images_directory", "policy_file")
    @classmethod
    def _refuse_relative(cls, value: Path | None) -> Path | None:
        """Refuse paths whose meaning depends on the working directory."""
        if value is not None and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @cached_property
    def principal_ids(self) -> dict[int, str]:
        """The configured principal of each uid."""
        return {uid: principal.id for principal in self.principals for uid in principal.uids}

    @property
    def own_images(self) -> Path:
        """The folder of the operator's own images; it need not exist."""
        return self.images_directory or self.state_directory / "images"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def load_config(**overrides: Any) -> Config:
    """Read file and environment; `overrides` that are None do not count.

    Raises:
        ConfigError: with every fault.
    """
    require_named_file()
    try:
        return Config(**{key: value for key, value in overrides.items() if value is not None})
    except ValidationError as error:
        faults = "; ".join(
            _fault_words(fault) for fault in error.errors(include_url=False, include_input=False)
        )
        raise ConfigError(f"The configuration is wrong: {faults}") from None
    except ValueError as error:  # not TOML, not UTF-8, an unreadable variable
        raise ConfigError(f"The configuration cannot be read: {error}") from None


def _fault_words(fault: ErrorDetails) -> str:
    """Describe one fault; of an unknown key also its source and similar keys."""
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] != "extra_forbidden":
        return f"{path}: {fault['msg']}"
    *above, key = fault["loc"]
    meant = did_you_mean(str(key), _fields_at(above))
    return f"{path}: there is no such key{_place_of(fault['loc'])}.{meant}"


def _place_of(path: Sequence[int | str]) -> str:
    variable = variable_of(path)
    if any(name.upper() == variable for name in os.environ):
        return f" (variable {variable})"
    return f" in {config_file()}" if config_file().is_file() else ""


def variable_of(path: Sequence[int | str]) -> str:
    """The variable of the environment that sets a key."""
    return "FUMEHOOD_" + "__".join(map(str, path)).upper()


def _fields_at(path: Sequence[int | str]) -> list[str]:
    """The keys of a table of the configuration."""
    model: Any = Config
    for part in path:
        field = model.model_fields.get(part)  # None: a place in a list, or a name that was chosen
        model = (table_of(field.annotation) if field is not None else None) or model
    return list(model.model_fields)


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's type, which may be optional or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(table_of, get_args(annotation))), None)
