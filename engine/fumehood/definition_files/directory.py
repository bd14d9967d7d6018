"""A directory of definitions: the tools that its files define, and the faults of each file.

Host side. The directory is polled, which works on every file system, including network file
systems, and takes a few milliseconds for a thousand files. This module uses `trusted_files`, which
finds out which users could write a file, `protocol/files`, which parses files, and the index's
checks.

Invariants: a file is loaded completely or not at all. A faulty file offers no tools, even if it
offered tools before: if an operator removes a tool and makes a mistake elsewhere in the file, the
removed tool must not stay available. Two files that define the same name and version are both left
out, so that file names never decide which one is served.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fumehood.core.json_types import JsonObject
from fumehood.protocol.files import SUFFIXES, FileFault, one_line, read_values
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import RegisteredTool, Source, ToolIndex, tool_of_document
from fumehood.registry.secrets import NO_SECRETS, SecretBindings
from fumehood.sandbox.trusted_files import (
    Signature,
    Untrusted,
    list_files,
    open_directory,
    read_file,
)

PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Temporary errors of the host that do not concern a certain file. The next poll reads the files
again."""

MAX_DEFINITIONS = 10_000
"""Maximum number of definitions in one file."""


@dataclass(frozen=True, slots=True)
class DirectoryFault:
    """A file whose tools are not offered, and the reason. If `file` is None, the fault concerns the
    whole directory.
    """

    file: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """The tools and faults of a directory at one moment."""

    tools: tuple[RegisteredTool, ...] = ()
    faults: tuple[DirectoryFault, ...] = ()


_Look = dict[str, Signature] | str
"""The result of one poll: the signatures of the files, by file name, or the reason why the poll
failed."""


class ToolDirectory:
    """Reads tool definitions from the files in a directory, and detects changes. Not thread-safe.

    `path` is the directory. `owner_of` takes a tool's name. It returns the name of another source
    that already has this tool, or None; in the first case, the file that defines the tool is
    faulty.

    `owners` are the user ids whose files are trusted. The default are the engine's user and root.
    `secrets` are the secrets to which definitions may refer.
    """

    def __init__(
        self,
        path: Path,
        owner_of: Callable[[str], str | None] = lambda name: None,
        owners: frozenset[int] | None = None,
        secrets: SecretBindings = NO_SECRETS,
    ) -> None:
        self.path = path
        self._owner_of = owner_of
        self._owners = owners if owners is not None else frozenset({0, os.geteuid()})
        self._secrets = secrets
        self._last: _Look = {}
        self._read_of: _Look = {}
        """The result of the poll that preceded the last reading of the files."""

    def load(self) -> DirectoryContents:
        """Read the whole directory now, and return its contents."""
        self._last = self._look()
        return self._read(self._last)

    def poll(self) -> DirectoryContents | None:
        """Check the directory. Return its contents if something has changed, otherwise None.

        A change takes effect once two polls in a row have found the same files, so that a file is
        never read while it is being written. A fault of the directory takes effect immediately.
        """
        look, before = self._look(), self._last
        self._last = look
        has_settled = look == before or isinstance(look, str)
        return self._read(look) if has_settled and look != self._read_of else None

    def _look(self) -> _Look:
        try:
            with self._opened() as directory:
                return list_files(directory)
        except Untrusted as refused:
            return str(refused)
        except OSError as error:
            return f"the directory cannot be read: {error.strerror}"

    @contextmanager
    def _opened(self) -> Iterator[int]:
        directory = open_directory(self.path, self._owners)
        try:
            yield directory
        finally:
            os.close(directory)

    def _read(self, look: _Look) -> DirectoryContents:
        if isinstance(look, str):
            self._read_of = look
            return DirectoryContents(faults=(DirectoryFault(None, look),))
        read_of: _Look = look
        tools: dict[str, list[RegisteredTool]] = {}
        faults: dict[str, str] = {}
        try:
            with self._opened() as directory:
                for name, seen in look.items():
                    try:
                        tools[name] = self._read_file(directory, name, seen)
                    except (FileFault, Untrusted) as refused:
                        faults[name] = str(refused)
                    except OSError as error:
                        faults[name] = f"it cannot be read: {error.strerror}"
                        read_of = "" if error.errno in PASSING else read_of
                    except Exception as error:  # a bug must not keep the other files out
                        faults[name] = f"it could not be understood ({type(error).__name__})"
        except Untrusted as refused:
            return self._read(str(refused))
        self._read_of = read_of
        faults |= self._clashes(tools)
        return DirectoryContents(
            tuple(tool for name in sorted(tools) if name not in faults for tool in tools[name]),
            tuple(
                DirectoryFault(one_line(ascii(name)[1:-1]), reason)
                for name, reason in sorted(faults.items())
            ),
        )

    def _read_file(self, directory: int, name: str, seen: Signature) -> list[RegisteredTool]:
        if not name.endswith(SUFFIXES):
            raise FileFault(f"its name must end in one of {', '.join(SUFFIXES)}")
        data, signature = read_file(directory, name, self._owners)
        if signature != seen:  # the next poll sees the new signature and reads it again
            raise FileFault("it changed while it was read")
        return _tools(read_documents(name, data), self._secrets)

    def _clashes(self, files: dict[str, list[RegisteredTool]]) -> dict[str, str]:
        """Find the files whose tools conflict with those of another file or source. Return a
        dictionary from each such file's name to a description of the conflict.
        """
        clashes: dict[str, str] = {}
        first: dict[str, str] = {}
        for file, tools in sorted(files.items()):
            for tool in tools:
                name, version = tool.definition.name, tool.definition.version
                reference = f"{name}@{version}"
                other = first.setdefault(reference, file)
                if other != file:
                    clashes[file] = f"{reference} is in {other!a} as well; neither file is used"
                    clashes[other] = f"{reference} is in {file!a} as well; neither file is used"
                owner = self._owner_of(name)
                if owner is not None:
                    clashes[file] = f"the name {name} belongs to a tool of the source {owner!s}"
        return clashes


def directory_for(registry: ToolIndex, path: Path) -> ToolDirectory:
    """Return an object that reads tool definitions from the directory at `path`. It refuses tools
    that another source of `registry` already has, and uses the secrets of `registry`.
    """
    return ToolDirectory(
        path,
        owner_of=lambda name: registry.owner(name, but=Source.DIRECTORY),
        secrets=registry.secrets,
    )


def _tools(documents: list[JsonObject], secrets: SecretBindings) -> list[RegisteredTool]:
    tools: dict[str, RegisteredTool] = {}
    faults: list[str] = []
    for position, document in enumerate(documents):
        try:
            tool = tool_of_document(document, Source.DIRECTORY, secrets)
        except InvalidDefinition as error:
            faults.append(f"{_which(position, documents)}: {'; '.join(error.faults[:5])}")
            continue
        reference = f"{tool.definition.name}@{tool.definition.version}"
        if reference in tools:
            raise FileFault(f"{reference} is given twice")
        tools[reference] = tool
    if faults:
        raise FileFault(one_line("; ".join(faults), 2000))
    return list(tools.values())


def _which(position: int, documents: list[JsonObject]) -> str:
    """Return a text that identifies the definition at `position` among the `documents` of a file,
    for the message about a fault.
    """
    name = documents[position].get("name")
    named = f"{name[:64]!a}" if isinstance(name, str) else "a tool without a name"
    return named if len(documents) == 1 else f"{named} (number {position + 1})"


def read_documents(name: str, data: bytes) -> list[JsonObject]:
    """Parse the definitions in a file with this name and content. The suffix of `name` decides the
    format.

    Raises:
        FileFault: the data does not have this format, or contains no definitions.
    """
    value = read_values(name, data)
    if isinstance(value, dict) and "tools" in value:
        others = sorted(value.keys() - {"tools"})
        if others:
            raise FileFault(f"beside 'tools' there is {others[0][:40]!a}")
        value = value["tools"]
        if not isinstance(value, list):
            raise FileFault("'tools' is not a list of definitions")
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MAX_DEFINITIONS:
        raise FileFault(f"it holds {len(listed)} tools; at most {MAX_DEFINITIONS} are read")
    if not all(isinstance(item, dict) for item in listed):
        raise FileFault("neither a definition, nor a list of definitions, nor {'tools': [...]}")
    return listed
