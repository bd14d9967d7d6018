"""The paths of an engine's state and sockets, from the environment and the configuration file.

Used by the configuration, and by clients, which need only the path of a socket. A client reads only
the few settings that name a path. That takes a tenth of the time of reading the whole
configuration. Invariant: the configuration and the clients determine the same paths.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.core.errors import FumehoodError
from fumehood.protocol.strict_json import decoded

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length of a socket's path in bytes. *Source*: unix(7); `sun_path` has 108 bytes,
including a NUL.
"""

RUN_DIRECTORY = Path("/run/fumehood")
"""The default directory for the sockets of an engine that runs as a service."""

PREFIX = "fumehood_"
"""Prefix of the engine's environment variables, which may be in lower or upper case."""

PATHS = ("home", "socket")
MODES = ("single-user", "service")


class ConfigError(FumehoodError):
    """The configuration cannot be used. The message says what to change."""


@dataclass(frozen=True, slots=True)
class EnginePaths:
    """The configured paths of an engine, and the paths that are derived from them."""

    environ: Mapping[str, str]
    mode: str = "single-user"
    home: Path | None = None
    socket: Path | None = None
    run_directory: Path = RUN_DIRECTORY

    @property
    def state_directory(self) -> Path:
        """The directory of the engine's state."""
        if self.home is not None:
            return self.home
        base = self.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "fumehood"

    @property
    def socket_path(self) -> Path:
        """The path of the socket for callers.

        Raises:
            ConfigError: the path is longer than the operating system allows for a socket.
        """
        return fitting(self._callers())

    @property
    def control_socket_path(self) -> Path:
        """The path of the socket for approvers and administrators. In single-user mode, this socket
        is in the same directory as the socket for callers.

        Raises:
            ConfigError: the path is longer than the operating system allows for a socket.
        """
        if self.mode == "service":
            return fitting(self.run_directory / "control" / "control.sock")
        callers = self._callers()
        name = callers.name.removeprefix("engine.sock") or ""
        return fitting(callers.with_name(f"control-{name}" if name else "control.sock"))

    def _callers(self) -> Path:
        if self.socket is not None:
            return self.socket
        if self.mode == "service":
            return self.run_directory / "engine" / "engine.sock"
        runtime = self.environ.get("XDG_RUNTIME_DIR")
        if self.home is None and runtime:
            return Path(runtime) / "fumehood" / "engine.sock"
        return self.state_directory / "engine.sock"


def fitting(path: Path) -> Path:
    """Return the path of a socket as an absolute path.

    Raises:
        ConfigError: the path is longer than the operating system allows for a socket.
    """
    absolute = path.absolute()
    length = len(os.fsencode(absolute))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"The socket's path has {length} bytes, the kernel allows {MAX_SOCKET_PATH_BYTES}: "
            "set FUMEHOOD_SOCKET (or FUMEHOOD_HOME) to a shorter one."
        )
    return absolute


def config_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the configuration file. The file may not exist. `environ` are environment
    variables.
    """
    named = environ.get("FUMEHOOD_CONFIG")
    if named:
        return Path(named)
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "fumehood" / "config.toml"


def read_config_file(file: Path) -> dict[str, Any]:
    """Read a configuration file, and return its settings.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8 or not TOML.
    """
    import tomllib

    return tomllib.loads(decoded(file.read_bytes()))


def read_engine_paths(environ: Mapping[str, str]) -> EnginePaths | None:
    """Read the settings that name paths from the environment and the configuration file.

    Return None if a setting is invalid or the file cannot be read. In this case, loading the whole
    configuration reports the reason.
    """
    variables = {name.lower(): value for name, value in environ.items() if value}
    file, document = config_file(environ), dict[str, Any]()
    try:
        if file.is_file() or environ.get("FUMEHOOD_CONFIG"):
            document = read_config_file(file)
        table = json.loads(variables.get(f"{PREFIX}service", "{}"))
        service = document.get("service", {}) | table
    except (OSError, ValueError, TypeError):
        return None
    settings = {name: document[name] for name in ("mode", *PATHS) if name in document}
    if "run_directory" in service:
        settings["service__run_directory"] = service["run_directory"]
    for name in ("mode", *PATHS, "service__run_directory"):
        if (value := variables.get(PREFIX + name)) is not None:
            settings[name] = value
    mode = settings.get("mode", MODES[0])
    if mode not in MODES or not all(isinstance(value, str) for value in settings.values()):
        return None
    home, socket = (Path(settings[name]) if name in settings else None for name in PATHS)
    run_directory = Path(settings.get("service__run_directory", RUN_DIRECTORY))
    return EnginePaths(environ, mode, home, socket, run_directory)
