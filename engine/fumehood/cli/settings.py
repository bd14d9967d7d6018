"""Configuration for commands: read once, faults in words, exit 2."""

from __future__ import annotations

from pathlib import Path

from fumehood.cli.exits import ExitCode, fail
from fumehood.config import Config, ConfigError, load_config


def read_config(**overrides: object) -> Config:
    """The configuration, with the command's own options on top."""
    try:
        return load_config(**overrides)
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def read_socket_path(config: Config) -> Path:
    """Where the daemon is to be found."""
    try:
        return config.socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def read_control_path(config: Config) -> Path:
    """Where it listens to administrators."""
    try:
        return config.control_socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)
