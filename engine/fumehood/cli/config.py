"""`fumehood config`: the effective configuration and its sources."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from fumehood.cli.options import AsJson
from fumehood.cli.reach import read_config, read_socket_path
from fumehood.cli.show import Column, show_json, show_table, wants_json
from fumehood.config import Config, config_file, is_masked, variable_of
from fumehood.core.escaping import json_line, visible
from fumehood.core.json_types import JsonObject
from fumehood.protocol.engine_paths import read_config_file

config = typer.Typer(help="The configuration: values and their sources.", no_args_is_help=True)

KeyPath = tuple[str, ...]

FILE, DEFAULT = KNOWN_SOURCES = ("file", "default")
"""The sources of values that no environment variable sets: the configuration file and the default.
If a variable sets a value, the source is the variable's name."""


@config.command("show")
def show(
    is_set: Annotated[
        bool, typer.Option("--set", help="Only values set in the file or a variable.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting and its source: default, file or variable.

    It reads the configuration as a daemon started here and now would. A running daemon keeps
    the one it started with.
    """
    found = read_config()
    file = config_file()
    settings = [
        setting for setting in _settings(found, file) if not is_set or setting[2] != DEFAULT
    ]
    places: JsonObject = {
        "file": str(file.absolute()),
        "file_is_there": file.is_file(),
        "state_directory": str(found.state_directory.absolute()),
        "socket": str(read_socket_path(found)),
        "control_socket": str(read_socket_path(found, control=True)),
    }
    if wants_json(as_json):
        rows = {".".join(path): {"value": v, "source": source} for path, v, source in settings}
        show_json({**places, "settings": rows})
    else:
        _show(places, settings)


Setting = tuple[KeyPath, Any, str]
"""A key, its JSON value, and the source of the value."""


def _show(places: JsonObject, settings: list[Setting]) -> None:
    absent = "" if places["file_is_there"] else " (does not exist)"
    print(f"configuration file  {visible(places['file'])}{absent}")
    print(f"state directory     {visible(places['state_directory'])}")
    print(f"sockets             {visible(places['socket'])}")
    print(f"                    {visible(places['control_socket'])}")
    rows = [
        (".".join(path), json_line(value), source if source in KNOWN_SOURCES else "environment")
        for path, value, source in settings
    ]
    show_table((Column("setting", whole=True), Column("value"), Column("from")), rows)


def _settings(found: Config, file: Path) -> Iterator[Setting]:
    from pydantic_settings import EnvSettingsSource

    from fumehood.redaction.redactor import Redactor

    redactor = Redactor(found.redaction)  # the command of an MCP server may contain a key
    document = read_config_file(file) if file.is_file() else {}
    from_environment = EnvSettingsSource(type(found))()
    for path, value in _leaves(json.loads(found.model_dump_json())):
        source = FILE if _is_in(document, path) else DEFAULT
        if _is_in(from_environment, path):
            source = _variable(path)
        yield path, redactor.value(_masked(path, value))[0], source


def _leaves(table: JsonObject, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _masked(path: KeyPath, value: Any) -> Any:
    if path[0] == "presets" and path[2:3] == ("env",) and value:
        return "***"
    if not isinstance(value, str) or not is_masked(path):
        return value
    parts = urlsplit(value)
    return f"{parts.scheme}://{parts.hostname}/***"


def _variable(path: KeyPath) -> str:
    """Return the name of the environment variable that sets the configuration key at `path`. The
    variable can also set a whole table that contains the key. The caller must know that such a
    variable is set.
    """
    names = {name.upper() for name, value in os.environ.items() if value}
    variables = [variable_of(path[:end]) for end in range(len(path), 0, -1)]
    return next(variable for variable in variables if variable in names)


def _is_in(table: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True
