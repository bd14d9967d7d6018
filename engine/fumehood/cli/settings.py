"""Configuration for commands; a fault exits with code 2.

Finding a socket reads only the part of the configuration that says where it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.cli.exits import ExitCode, fail
from fumehood.protocol.engine_paths import config_file, fitting, read_engine_paths

if TYPE_CHECKING:
    from fumehood.config import Config


def read_config(**overrides: object) -> Config:
    """Load the configuration, overridden by the command's options."""
    from fumehood.config import ConfigError, load_config

    try:
        return load_config(**overrides)
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def config_fault() -> str:
    """Return all faults of the configuration file, or an empty string; no file has no faults."""
    if not config_file(os.environ).is_file():
        return ""
    from fumehood.config import ConfigError, load_config

    try:
        load_config()
    except ConfigError as error:
        return str(error)
    return ""


def read_socket_path(config: Config) -> Path:
    """Return the socket of a daemon with this configuration."""
    from fumehood.config import ConfigError

    try:
        return config.socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def read_control_path(config: Config) -> Path:
    """Return the control socket of a daemon with this configuration."""
    from fumehood.config import ConfigError

    try:
        return config.control_socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def find_socket(given: Path | None = None) -> Path:
    """Return the callers' socket: as given, or by configuration."""
    try:
        if given is not None:
            return fitting(given)
        if (paths := read_engine_paths(os.environ)) is not None:
            return paths.socket_path
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)
    return read_socket_path(read_config())


def find_control_socket(given: Path | None = None) -> Path:
    """Return the control socket: as given, or by configuration."""
    try:
        if given is not None:
            return given.absolute()
        if (paths := read_engine_paths(os.environ)) is not None:
            return paths.control_socket_path
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)
    return read_control_path(read_config())
