"""`fumehood mcp add|remove`: the tables `[mcp_servers.NAME]` of the configuration file.

A running daemon keeps the configuration that it started with, so nothing here gives it a server:
the authority is that of writing the file and restarting the daemon. The rest of the file stays as
it is, with its comments; a change that would be more than the one table is refused.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fumehood.cli.escaping import say
from fumehood.cli.exits import ExitCode, fail
from fumehood.config import config_file
from fumehood.core.json_types import JsonObject
from fumehood.executors.mcp_settings import AllMcpServers
from fumehood.protocol.strict_json import dumps

NEXT_START = "A daemon reads it when it starts: restart one that runs."


def add_server(name: str, given: JsonObject) -> None:
    """Append the table of a server to the file."""
    server = {key: value for key, value in given.items() if value}
    try:
        TypeAdapter(AllMcpServers).validate_python({name: server})
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        fail("; ".join(_fault_words(name, fault) for fault in faults), ExitCode.USAGE)
    file, text, document = _read()
    servers = document.get("mcp_servers", {})
    if name in servers:
        fail(f"{file} has a server {name} already: remove it first.", ExitCode.USAGE)
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    lines = [f"[mcp_servers.{name}]", *(f"{key} = {_toml(server[key])}" for key in server), ""]
    after = text + gap + "\n".join(lines)
    _replace(file, after, {**document, "mcp_servers": {**servers, name: server}})
    but = ", but for those of --harmless" if "harmless" in server else ""
    say(f"Added {name} to {file}. Its tools, {name}__…, are dangerous{but}. {NEXT_START}")


def remove_server(name: str) -> None:
    """Take the table of a server out of the file."""
    file, text, document = _read()
    servers = dict(document.get("mcp_servers", {}))
    if servers.pop(name, None) is None:
        fail(f"{file} has no server {name}.", ExitCode.USAGE)
    own = re.compile(rf"\[\s*mcp_servers\s*\.\s*([\"']?){re.escape(name)}\1\s*[].]")
    tables = re.split(r"^(?=[ \t]*\[)", text, flags=re.MULTILINE)
    kept = [_remarks_after(one) if own.match(one.lstrip()) else one for one in tables]
    _replace(file, "".join(kept), {**document, "mcp_servers": servers})
    say(f"Removed {name} from {file}. {NEXT_START}")


def _remarks_after(table: str) -> str:
    """The comments at the end of a table, which are about the next one."""
    found = re.search(r"(?:^[ \t]*(?:#.*)?\n)*\Z", table, re.MULTILINE)
    return found[0] if found is not None else ""


def _read() -> tuple[Path, str, JsonObject]:
    file = config_file().absolute()
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return file, text, tomllib.loads(text)
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read: {error}", ExitCode.USAGE)


def _replace(file: Path, text: str, expected: JsonObject) -> None:
    """Write the file in one step, if the text says what is expected. Owner and mode stay."""
    found = None
    with suppress(ValueError):
        found = {"mcp_servers": {}, **tomllib.loads(text)}
    if found != expected:
        fail(f"{file} has a form that cannot be changed here. Edit it by hand.", ExitCode.USAGE)
    file, part = file.resolve(), None
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, part = tempfile.mkstemp(".part", f".{file.name}.", file.parent)
        with os.fdopen(number, "w", encoding="utf-8") as made:
            if file.exists():
                os.fchown(number, file.stat().st_uid, file.stat().st_gid)
                os.fchmod(number, stat.S_IMODE(file.stat().st_mode))
            made.write(text)
        Path(part).replace(file)
    except OSError as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        fail(f"{file} cannot be written: {error.strerror}.", ExitCode.USAGE)


def _fault_words(name: str, fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"] if part not in (name, "[key]"))
    return f"{path or name}: {fault['msg'].removeprefix('Value error, ')}"


def _toml(value: Any) -> str:
    """A value as TOML, of which a text in JSON is a part."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(key)} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, str):
        return dumps(value).decode()
    return f"[{', '.join(map(_toml, value))}]"
