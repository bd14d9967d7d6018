"""Configuration: a file and the environment, read once at start into one frozen value.

The environment wins over the file (`FUMEHOOD_CONFIG`, else `config.toml` under
`$XDG_CONFIG_HOME/fumehood`). Invariant: absent means the safe default, an unknown key is
an error, and nothing here changes while the engine runs.

| setting | absent | empty | filled |
|---|---|---|---|
| `host_tools` | none may run in the host | the same | exactly these names may |
| `tools_directory` | no file brings tools | the same | the definitions in this directory |
| `images_directory` | `images` in the state directory | the same | one's own images are there |
| `allow_debug` | no `debug_info` for anybody | – | for calls that ask |
| `policy_file` | dangerous tools ask, others are allowed | – | the rules in this file besides |
| `budgets` | nothing is limited | the same | each of them limits what it counts |
| `webhook` | nobody is told of approvals | – | this address is, and may decide if it says so |
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode, SettingsConfigDict

from fumehood.approvals.settings import ApprovalSettings as ApprovalsConfig
from fumehood.approvals.settings import WebhookSettings as WebhookConfig
from fumehood.budgets.model import BudgetRule, Period
from fumehood.core.limits import (
    CONTAINER_MEMORY_CLASSES,
    MIN_INTERPRETER_MB,
    MIN_JAIL_MB,
    WallLimits,
)
from fumehood.core.names import did_you_mean
from fumehood.core.session import SessionRules
from fumehood.core.usage import Prices
from fumehood.protocol.sockets import ConfigError as ConfigError
from fumehood.protocol.sockets import ServiceConfig as ServiceConfig
from fumehood.protocol.sockets import SocketSettings, require_named_file
from fumehood.protocol.sockets import config_file as config_file


class InterpreterConfig(BaseModel):
    """Defaults and ceilings of the interpreter wall."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_seconds: float = Field(default=5, gt=0, le=600)
    max_timeout_seconds: float = Field(default=30, gt=0, le=600)
    cpu_seconds: float | None = Field(default=None, gt=0)
    memory_mb: int = Field(default=64, ge=16)
    max_memory_mb: int = Field(default=256, ge=16)
    output_kb: int = Field(default=64, ge=1, le=1024)


class JailConfig(BaseModel):
    """Defaults and ceilings of the jail, where sandboxed functions run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_seconds: float = Field(default=30, gt=0, le=600)
    max_timeout_seconds: float = Field(default=600, gt=0, le=600)
    cpu_seconds: float | None = Field(default=None, gt=0)
    memory_mb: int = Field(default=256, ge=MIN_JAIL_MB)
    max_memory_mb: int = Field(default=2048, ge=MIN_JAIL_MB)
    output_kb: int = Field(default=1024, ge=1, le=1024)


IMAGE_NAME = r"^[a-z][a-z0-9-]{0,30}$"


class ImagesConfig(BaseModel):
    """Which image a program in a language runs in, where no session says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str = Field(default="python-data", pattern=IMAGE_NAME)
    shell: str = Field(default="shell", pattern=IMAGE_NAME)
    javascript: str = Field(default="node", pattern=IMAGE_NAME)


class ContainerConfig(BaseModel):
    """Defaults and ceilings of the container wall, and how many containers there are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: ImagesConfig = ImagesConfig()
    runtime: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    timeout_seconds: float = Field(default=30, gt=0, le=600)
    max_timeout_seconds: float = Field(default=600, gt=0, le=600)
    cpu_seconds: float | None = Field(default=None, gt=0)
    cpus: float = Field(default=1, ge=0.1, le=64)
    memory_mb: int = Field(default=512, ge=128, le=2048)
    max_memory_mb: int = Field(default=2048, ge=128, le=2048)
    output_kb: int = Field(default=1024, ge=1, le=1024 * 1024)
    pool_min: int = Field(default=1, ge=0, le=256)
    pool_max: int = Field(default=8, ge=1, le=256)
    max_uses: int = Field(default=1000, ge=1, le=1_000_000)
    idle_seconds: float = Field(default=300, ge=1, le=86_400)
    lifetime_seconds: float = Field(default=3600, ge=10, le=86_400)
    queue_seconds: float = Field(default=30, ge=0, le=600)

    @model_validator(mode="after")
    def _warm_ones_fit(self) -> Self:
        if self.pool_min > self.pool_max:
            raise ValueError("pool_min is more than pool_max")
        return self


class SessionsConfig(BaseModel):
    """Defaults and ceilings of sessions, and how many there are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(default="python-data", pattern=IMAGE_NAME)
    max: int = Field(default=4, ge=0, le=256)
    max_per_principal: int = Field(default=3, ge=0, le=256)
    idle_seconds: float = Field(default=1800, ge=1, le=86_400)
    lifetime_seconds: float = Field(default=14_400, ge=10, le=604_800)
    queue_seconds: float = Field(default=30, ge=0, le=600)
    waiting: int = Field(default=20, ge=0, le=1000)


class PriceConfig(BaseModel):
    """Prices on resources, per CPU-second and per GB of memory limit and second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_second: Decimal = Field(default=Decimal(0), ge=0)
    gb_second: Decimal = Field(default=Decimal(0), ge=0)
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")


Uid = Annotated[int, Field(ge=0, lt=2**32)]


class PrincipalConfig(BaseModel):
    """A name for Unix users; several uids may be one principal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}$")
    uids: tuple[Uid, ...] = Field(min_length=1)


class BudgetConfig(BaseModel):
    """One budget: so much for each of what `per` names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    per: tuple[Literal["principal", "agent", "session", "tool"], ...] = ()
    period: Literal["day", "total"] = "day"
    tools: tuple[str, ...] = ()
    """Which tools it counts, by name or with a written `*`; none means every one."""
    agents: tuple[str, ...] = ()
    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    money: Decimal | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.calls is None and self.tokens is None and self.money is None:
            raise ValueError("a budget needs `calls`, `tokens` or `money`")
        return self


class AuditConfig(BaseModel):
    """How often the audit chain's head is anchored outside the database."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor_rows: int = Field(default=1000, ge=1, le=1_000_000)
    anchor_seconds: float = Field(default=300, ge=1, le=86_400)


class Config(SocketSettings):
    """Everything an operator can set."""

    model_config = SettingsConfigDict(extra="forbid")

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
    interpreter: InterpreterConfig = InterpreterConfig()
    jail: JailConfig = JailConfig()
    container: ContainerConfig = ContainerConfig()
    sessions: SessionsConfig = SessionsConfig()
    prices: PriceConfig = PriceConfig()
    environment: str = Field(default="production", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    policy_file: Path | None = None
    approvals: ApprovalsConfig = ApprovalsConfig()
    budgets: tuple[BudgetConfig, ...] = ()
    audit: AuditConfig = AuditConfig()
    webhook: WebhookConfig | None = None
    principals: tuple[PrincipalConfig, ...] = ()

    @field_validator("host_tools", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """The environment has no lists: names are separated by commas there."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("tools_directory", "images_directory", "policy_file")
    @classmethod
    def _refuse_relative(cls, value: Path | None) -> Path | None:
        """What there is must not depend on where the engine was started."""
        if value is not None and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @field_validator("budgets")
    @classmethod
    def _one_budget_a_name(cls, value: tuple[BudgetConfig, ...]) -> tuple[BudgetConfig, ...]:
        names = [budget.name for budget in value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two budgets have the name {twice}")
        return value

    @field_validator("principals")
    @classmethod
    def _one_principal_a_uid(
        cls, value: tuple[PrincipalConfig, ...]
    ) -> tuple[PrincipalConfig, ...]:
        uids = [uid for principal in value for uid in principal.uids]
        twice = next((uid for uid in uids if uids.count(uid) > 1), None)
        if twice is not None:
            raise ValueError(f"the uid {twice} is given to more than one principal")
        return value

    @cached_property
    def principal_ids(self) -> dict[int, str]:
        """The configured principal of each uid."""
        return {uid: principal.id for principal in self.principals for uid in principal.uids}

    @property
    def own_images(self) -> Path:
        """Where the recipes of the operator's own images are; it need not exist."""
        return self.images_directory or self.state_directory / "images"

    @property
    def interpreter_limits(self) -> WallLimits:
        """The interpreter wall's limits as configured."""
        chosen = self.interpreter
        return WallLimits(
            default_wall_s=chosen.timeout_seconds,
            max_wall_s=chosen.max_timeout_seconds,
            default_memory_mb=chosen.memory_mb,
            max_memory_mb=chosen.max_memory_mb,
            min_memory_mb=MIN_INTERPRETER_MB,
            output_bytes=chosen.output_kb * 1024,
            cpu_s=chosen.cpu_seconds,
        )

    @property
    def jail_limits(self) -> WallLimits:
        """The jail's limits as configured."""
        chosen = self.jail
        return WallLimits(
            default_wall_s=chosen.timeout_seconds,
            max_wall_s=chosen.max_timeout_seconds,
            default_memory_mb=chosen.memory_mb,
            max_memory_mb=chosen.max_memory_mb,
            min_memory_mb=MIN_JAIL_MB,
            output_bytes=chosen.output_kb * 1024,
            cpu_s=chosen.cpu_seconds,
        )

    @property
    def container_limits(self) -> WallLimits:
        """The container wall's limits as configured; memory in classes."""
        chosen = self.container
        return WallLimits(
            default_wall_s=chosen.timeout_seconds,
            max_wall_s=chosen.max_timeout_seconds,
            default_memory_mb=chosen.memory_mb,
            max_memory_mb=chosen.max_memory_mb,
            min_memory_mb=CONTAINER_MEMORY_CLASSES[0],
            output_bytes=chosen.output_kb * 1024,
            cpu_s=chosen.cpu_seconds,
            memory_classes=CONTAINER_MEMORY_CLASSES,
        )

    @property
    def session_rules(self) -> SessionRules:
        """The rules of sessions as configured."""
        chosen = self.sessions
        return SessionRules(
            image=chosen.image,
            most=chosen.max,
            most_of_one=min(chosen.max_per_principal, chosen.max),
            idle_s=chosen.idle_seconds,
            lifetime_s=chosen.lifetime_seconds,
            queue_s=chosen.queue_seconds,
            waiting=chosen.waiting,
        )

    @property
    def resource_prices(self) -> Prices:
        """The prices as the accounting stage takes them."""
        return Prices(self.prices.cpu_second, self.prices.gb_second, self.prices.currency)

    @property
    def budget_rules(self) -> tuple[BudgetRule, ...]:
        """The budgets as the gate takes them."""
        return tuple(
            BudgetRule(**{**budget.model_dump(), "period": Period(budget.period)})
            for budget in self.budgets
        )


def load_config(**overrides: Any) -> Config:
    """Read file and environment; `overrides` that are None are left out.

    Raises:
        ConfigError: with every fault, in words.
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
    """One fault: the path of its key, what is wrong, and for an unknown key where it stands and
    what may have been meant.
    """
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
    """The keys that there are in a table of the configuration."""
    model: Any = Config
    for part in path:
        if isinstance(part, int):  # of a list, whose field was the step before
            continue
        model = table_of(model.model_fields[part].annotation)
    return list(model.model_fields)


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds: itself, or each entry of a list, or where it is not None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(table_of, get_args(annotation))), None)
