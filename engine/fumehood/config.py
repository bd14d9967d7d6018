"""Configuration: a file and the environment, read once at the start into one frozen value.

The settings of each feature are in its own package, usually in `settings.py`. This module combines
them with the settings of the engine as a whole.

The file is the one that `FUMEHOOD_CONFIG` names, otherwise `config.toml` under
`$XDG_CONFIG_HOME/fumehood`. A setting in an environment variable overrides the file. Invariants: an
absent setting has a safe default; an unknown key is an error; nothing changes while the engine
runs. The table shows the meaning of each setting.

| setting | absent | empty | filled |
|---|---|---|---|
| `parts` | no parts of other packages | the same | also these parts, in the engine |
| `host_tools` | no function runs on the host | the same | only these functions may run there |
| `tcp` | callers use the socket only | the same | also this address, with a token |
| `tools_directory` | no tools from files | the same | the definitions in this directory |
| `images_directory` | `images` in the state directory | the same | image recipes of the operator |
| `result_checkers` | results are not checked | the same | these checkers run |
| `allow_debug` | no `debug_info` | – | `true`: in answers to calls that request it |
| `policy_file` | dangerous tools need approval | – | also the rules in this file |
| `budgets` | no limits on spending | the same | each one limits the calls that it covers |
| `rest.allowed_hosts` | REST tools reach public addresses | the same | also these hosts |
| `secrets` | definitions can use no secrets | the same | these secrets, for their tools and hosts |
| `web.fetch_url` | `fetch_url` is disabled | – | `true`: agents can read the web |
| `web.only_hosts` | every host with public addresses | no host | only these hosts |
| `web.search` | `search_web` is disabled | – | `search_web` uses this service |
| `cache` | 64 MB of results, each for 300 s | the same | these limits; `max_mb = 0`: no cache |
| `rate_limits` | only limits in definitions | the same | each one limits the calls it covers |
| `external_tools` | callers' own tools are dangerous | the same | treated as these settings say |
| `mcp_servers` | no tools of MCP servers | the same | the tools of these servers |
| `presets` | there are no presets | the same | sessions can be created from these presets |
| `state.url` | the state is in a SQLite file | – | it is in this database |
| `files.url` | blobs and events are in the state directory | – | they are at this address |
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from fumehood.approvals.model import ApprovalSettings
from fumehood.circuits.breaker import CircuitSettings
from fumehood.core.names import did_you_mean
from fumehood.core.part import PartError, imported
from fumehood.core.usage import Prices
from fumehood.core.value import MASKED_URL, Value, table_of
from fumehood.identity.model import AllPrincipals
from fumehood.parts import VARIABLE, parts, split_names
from fumehood.protocol import engine_paths
from fumehood.protocol.engine_paths import RUN_DIRECTORY, EnginePaths
from fumehood.protocol.engine_paths import ConfigError as ConfigError
from fumehood.redaction.redactor import RedactionSettings
from fumehood.registry.secrets import AllSecrets, RestSettings
from fumehood.registry.settings import AllExternalTools, WebToolSettings
from fumehood.sandbox.settings import (
    AllPresets,
    ContainerSettings,
    JailSettings,
    SessionSettings,
    require_presets_within,
)
from fumehood.storage.settings import FileSettings, RecordSettings, StateSettings

T = TypeVar("T")

PREFIX, NESTED = "FUMEHOOD_", "__"
"""The prefix of environment variables, and the separator between a table and its key."""


class TlsSettings(Value):
    """The paths of two PEM files, with the certificate chain and the private key for the engine's
    TCP address.
    """

    cert: Path
    key: Path


class ServiceConfig(Value):
    """The directory and group of a service's sockets (`mode = "service"`)."""

    run_directory: Path = RUN_DIRECTORY
    callers_group: str = "fumehood-callers"
    approvers_group: str = "fumehood-approvers"


class KernelConfig(BaseSettings):
    """The settings of the kernel (the engine without its parts). `Config` also has the settings of
    the parts.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter=NESTED,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
    )

    mode: Literal["single-user", "service"] = "single-user"
    home: Path | None = None
    socket: Path | None = None
    service: ServiceConfig = ServiceConfig()
    tcp: str | None = None
    tcp_behind_proxy: bool = False
    tls: TlsSettings | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    allow_debug: bool = False
    parts: Annotated[tuple[str, ...], NoDecode] = ()
    host_tools: Annotated[tuple[str, ...], NoDecode] = ()
    images_directory: Path | None = None
    drain_seconds: float = Field(default=10, ge=0, le=600)
    calls_kept_days: int = Field(default=30, ge=1, le=3650)
    calls_kept: int = Field(default=100_000, ge=100, le=100_000_000)
    record: RecordSettings = RecordSettings()
    blobs_kept_hours: float = Field(default=24, gt=0, le=24 * 365)
    blobs_kept_mb: int = Field(default=1024, ge=1, le=1_000_000)
    jail: JailSettings = JailSettings()
    container: ContainerSettings = ContainerSettings()
    sessions: SessionSettings = SessionSettings()
    presets: AllPresets = Field(default_factory=dict)
    state: StateSettings = StateSettings()
    files: FileSettings = FileSettings()
    prices: Prices = Prices()
    environment: str = Field(default="production", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    policy_file: Path | None = None
    approvals: ApprovalSettings = ApprovalSettings()
    circuits: CircuitSettings = CircuitSettings()
    principals: AllPrincipals = ()
    result_checkers: Annotated[tuple[str, ...], NoDecode] = ()
    redaction: RedactionSettings = RedactionSettings()
    rest: RestSettings = RestSettings()
    secrets: AllSecrets = Field(default_factory=dict)
    web: WebToolSettings = WebToolSettings()
    external_tools: AllExternalTools = Field(default_factory=dict)

    @field_validator("parts", "host_tools", "result_checkers", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """Split a text at commas into names, because an environment variable cannot hold a list."""
        return split_names(value)

    @field_validator("parts")
    @classmethod
    def _require_loaded(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Raise ValueError if `value` names a part that is not loaded. Parts are loaded when the
        program starts, so naming a part later has no effect.
        """
        if missing := set(value) - {part.name for part in parts()}:
            raise ValueError(f"{min(missing)!r} was not loaded: name it in {VARIABLE}")
        return value

    @field_validator("tcp")
    @classmethod
    def _require_address(cls, value: str | None) -> str | None:
        """Refuse any value except an IP address with a port."""
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65_536
        if not is_port or _address(host) is None:
            raise ValueError("must be an IP address with its port, such as 127.0.0.1:8321")
        return value

    @model_validator(mode="after")
    def _refuse_plain_text_on_networks(self) -> Self:
        """Refuse an address that other machines could reach without TLS."""
        if self.tcp is None:
            if self.tls is not None or self.tcp_behind_proxy:
                raise ValueError("tls and tcp_behind_proxy need tcp, the address to listen on")
            return self
        address = _address(self.tcp.rpartition(":")[0])
        is_loopback = address is not None and address.is_loopback
        if not is_loopback and (self.tls is None or self.tcp_behind_proxy):
            raise ValueError(
                "tcp must be a loopback address, such as 127.0.0.1:8321, unless tls.cert and "
                "tls.key are set; behind a proxy it must be one in any case"
            )
        return self

    @field_validator("presets")
    @classmethod
    def _within_sessions(cls, value: AllPresets, info: ValidationInfo) -> AllPresets:
        if "sessions" in info.data:  # otherwise `sessions` itself is invalid
            require_presets_within(value, info.data["sessions"])
        return value

    @field_validator("images_directory", "policy_file")
    @classmethod
    def _refuse_relative(cls, value: Path | None) -> Path | None:
        """Refuse paths whose meaning depends on the working directory."""
        if value is not None and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @cached_property
    def principal_ids(self) -> dict[int, str]:
        """Maps the id of a Unix user to the id of the principal that the configuration assigns to
        this user.
        """
        return {uid: principal.id for principal in self.principals for uid in principal.uids}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = engine_paths.read_config_file(config_file()) if config_file().is_file() else {}
        unknown = InitSettingsSource(settings_cls, dict(_unknown_tables(settings_cls)))
        return (init_settings, env_settings, unknown, InitSettingsSource(settings_cls, given))

    def of(self, key: str, kind: type[T]) -> T | None:
        """Return the settings of a part that have the configuration key `key` and the type `kind`,
        or None if they are absent.
        """
        value = getattr(self, key)
        assert value is None or isinstance(value, kind)
        return value

    @property
    def state_directory(self) -> Path:
        """The directory of the engine's state."""
        return self._paths.state_directory

    @property
    def socket_path(self) -> Path:
        """The path of the callers' socket. Raises ConfigError if the path is too long."""
        return self._paths.socket_path

    @property
    def control_socket_path(self) -> Path:
        """The path of the approvers' and administrators' socket.

        Raises ConfigError if the path is too long.
        """
        return self._paths.control_socket_path

    @property
    def recorded_calls(self) -> Literal["all", "failed", "none"]:
        """The calls whose arguments and answers are recorded."""
        return self.record.calls or ("none" if self.mode == "service" else "all")

    @property
    def own_images(self) -> Path:
        """The directory with the operator's own image recipes. The directory may be missing."""
        return self.images_directory or self.state_directory / "images"

    @property
    def _paths(self) -> EnginePaths:
        return EnginePaths(
            os.environ, self.mode, self.home, self.socket, self.service.run_directory
        )


def _unknown_tables(settings: type[BaseSettings]) -> Iterator[tuple[str, str]]:
    """Find the environment variables that set an unknown table or list. For each of them, yield the
    key of the table or list, and the variable's value.

    A key is unknown if `settings` has no field of this name, for example because a part is missing.
    The caller must validate the pairs as settings, which refuses the unknown keys.
    """
    for name, value in os.environ.items():
        beginning, _, path = name.upper().partition(PREFIX)
        key, separator, _ = path.lower().partition(NESTED)
        is_table = bool(separator and value) or value.lstrip().startswith(("{", "["))
        if path and not beginning and is_table and key not in settings.model_fields:
            yield key, value


def _with_parts() -> type[KernelConfig]:
    """Create the class of the configuration, which has the built-in settings and the settings of
    all parts.

    Raises:
        PartError: two parts, or a part and the engine itself, have a setting with the same key.
    """
    fields: dict[str, Any] = {}
    for part in parts():
        for key, setting in imported(part.settings, {}).items():
            if key in fields or key in KernelConfig.model_fields:
                raise PartError(f"The part {part.name!r} adds the setting {key!r} a second time.")
            fields[key] = (setting.type, setting.default)
    return create_model(
        "Config", __base__=KernelConfig, __module__=__name__, __doc__="All settings.", **fields
    )


if TYPE_CHECKING:

    class Config(KernelConfig):
        """All settings of the operator, including the settings of parts (see `KernelConfig.of`)."""

else:
    Config = _with_parts()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def config_file() -> Path:
    """Return the path of the configuration file, which may be missing."""
    return engine_paths.config_file(os.environ)


def load_config(**overrides: Any) -> Config:
    """Read the configuration from its file and from the environment.

    Each of the `overrides` replaces the value that was read, unless the override is None.

    Raises:
        ConfigError: the configuration is invalid; the message names every fault.
    """
    named = os.environ.get("FUMEHOOD_CONFIG")
    if named and not Path(named).is_file():
        raise ConfigError("FUMEHOOD_CONFIG names a file that does not exist.")
    try:
        return Config(**{key: value for key, value in overrides.items() if value is not None})
    except ValidationError as error:
        faults = "; ".join(
            _fault_words(fault) for fault in error.errors(include_url=False, include_input=False)
        )
        raise ConfigError(f"The configuration is wrong: {faults}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_file()} is not TOML: {error}") from None
    except ValueError as error:  # an unreadable variable
        raise ConfigError(f"The configuration cannot be read: {error}") from None


def _fault_words(fault: ErrorDetails) -> str:
    """Describe one fault. For an unknown key, add the file or variable that contains the key, and
    suggest a similar key.
    """
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] != "extra_forbidden":
        return f"{path}: {fault['msg']}"
    *above, key = fault["loc"]
    meant = did_you_mean(str(key), _fields_at(above))
    return f"{path}: there is no such key{_place_of(fault['loc'])}.{meant}"


def _place_of(path: Sequence[int | str]) -> str:
    variable = variable_of(path)
    for name in map(str.upper, os.environ):
        if name == variable or name.startswith(variable + NESTED):
            return f" (variable {name})"
    return f" in {config_file()}" if config_file().is_file() else ""


def variable_of(path: Sequence[int | str]) -> str:
    """Return the name of the environment variable that sets the configuration key at `path`."""
    return PREFIX + NESTED.join(map(str, path)).upper()


def _fields_at(path: Sequence[int | str]) -> list[str]:
    """Return the keys that are allowed in the configuration table at `path`."""
    return list(_table_at(path).model_fields)


def _table_at(path: Sequence[int | str]) -> type[BaseModel]:
    model: type[BaseModel] = Config
    for part in path:  # may also be a list index, or a name that the operator chose
        field = model.model_fields.get(str(part))
        model = (table_of(field.annotation) if field is not None else None) or model
    return model


def is_masked(path: Sequence[str]) -> bool:
    """Whether the value at `path` is a URL that may contain a secret and therefore must be masked
    when it is shown.
    """
    field = _table_at(path[:-1]).model_fields.get(path[-1])
    return field is not None and MASKED_URL in field.metadata
