"""The paths of an engine's sockets, by rules shared by the daemon, the clients and the CLI.

`config` extends these settings. Invariant: a client that is not given a path finds the socket of an
engine that has the same environment and configuration file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from fumehood.core.errors import faults_of
from fumehood.protocol import engine_paths
from fumehood.protocol.engine_paths import RUN_DIRECTORY, EnginePaths
from fumehood.protocol.engine_paths import ConfigError as ConfigError


class ServiceConfig(BaseModel):
    """The directory and group of a service's sockets (`mode = "service"`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_directory: Path = RUN_DIRECTORY
    callers_group: str = "fumehood-callers"
    approvers_group: str = "fumehood-approvers"


class SocketSettings(BaseSettings):
    """The settings that decide the paths of the sockets. All others are ignored."""

    model_config = SettingsConfigDict(
        env_prefix="FUMEHOOD_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
    )

    mode: Literal["single-user", "service"] = "single-user"
    home: Path | None = None
    socket: Path | None = None
    service: ServiceConfig = ServiceConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = TomlConfigSettingsSource(settings_cls, config_file())
        return (init_settings, env_settings, file)

    @property
    def state_directory(self) -> Path:
        """The directory of the engine's state."""
        return self._paths.state_directory

    @property
    def socket_path(self) -> Path:
        """The callers' socket.

        Raises:
            ConfigError: the path is longer than a Unix socket's may be.
        """
        return self._paths.socket_path

    @property
    def control_socket_path(self) -> Path:
        """The socket for approvers and administrators, in the same directory as the callers'
        socket.

        Raises:
            ConfigError: the path is longer than a Unix socket's may be.
        """
        return self._paths.control_socket_path

    @property
    def _paths(self) -> EnginePaths:
        return EnginePaths(
            os.environ, self.mode, self.home, self.socket, self.service.run_directory
        )


def find_sockets() -> SocketSettings:
    """Read the environment and the configuration file.

    Raises:
        ConfigError: they cannot be read, or their socket settings are wrong.
    """
    require_named_file()
    try:
        return SocketSettings()
    except ValidationError as error:
        words = "; ".join(f"{path}: {said}" for path, said in faults_of(error))
    except (ValueError, OSError) as error:  # not TOML, not UTF-8, not readable
        words = str(error)
    raise ConfigError(
        f"The engine's socket cannot be found, because the configuration is wrong: {words}. "
        "Correct it, or name the socket."
    )


def require_named_file() -> None:
    """Raise ConfigError if FUMEHOOD_CONFIG names a missing file."""
    named = os.environ.get("FUMEHOOD_CONFIG")
    if named and not Path(named).is_file():
        raise ConfigError("FUMEHOOD_CONFIG names a file that does not exist.")


def config_file() -> Path:
    """Return the path of the configuration file, which may be missing."""
    return engine_paths.config_file(os.environ)
