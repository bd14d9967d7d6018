"""A directory of definitions: the tools in its files, and the faults of each file.

Host side. Above it is the engine, which puts the tools into the index and polls twice a second;
below it are `trusted_files` (who could write a file), `protocol/files` (formats) and the index's
checks. It polls because that works on every file system, including network ones, and takes a few
milliseconds for a thousand files.

Invariants: a file is loaded completely or not at all. A faulty file offers nothing, even if it did
before: an operator who removed a tool and mistyped something else must not find the tool still
there. Two files that define the same name and version are both left out, so that file names never
decide which one is served.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolType
from fumehood.protocol.files import SUFFIXES, FileFault, one_line, read_values
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import RegisteredTool, Source, tool_of_document
from fumehood.registry.secrets import NO_SECRETS, SecretBindings
from fumehood.sandbox.trusted_files import (
    Signature,
    Untrusted,
    list_files,
    open_directory,
    read_file,
)

TYPES = (ToolType.REST, ToolType.MCP)
MAX_DEFINITIONS = 10_000
"""The most definitions in one file, and in the whole directory."""

_CHANGED = "it changed while it was read"


@dataclass(frozen=True, slots=True)
class DirectoryFault:
    """A file whose tools are not served, and the reason. `file` is None for a fault of the
    directory.
    """

    file: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """The tools and faults of a directory at one moment."""

    tools: tuple[RegisteredTool, ...] = ()
    faults: tuple[DirectoryFault, ...] = ()


@dataclass(frozen=True, slots=True)
class _Look:
    """The files that one poll found, by name, or the reason why the poll failed."""

    files: dict[str, Signature] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class _File:
    """The result of reading a file. If `signature` is None, the next poll reads the file again."""

    signature: Signature | None
    tools: tuple[RegisteredTool, ...] = ()
    fault: str | None = None


class ToolDirectory:
    """The directory at one path. Not thread-safe.

    `owner_of` names the other source that already has a tool's name; such a name is a fault of the
    file. `owners` are the users whose files are trusted; by default the engine's user and root.
    Definitions may refer to these `secrets`.
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
        self._last = _Look()
        self._files: dict[str, _File] = {}
        self._fault: str | None = None

    def load(self) -> DirectoryContents:
        """Read the whole directory now and return its contents."""
        self._last = self._look()
        self._update(self._last)
        return self._contents()

    def poll(self) -> DirectoryContents | None:
        """Check the directory. Returns its contents if they differ from the last ones returned.

        A change takes effect once two polls in a row have seen it, so that a file is never read
        while it is being written. A fault of the directory itself takes effect at once.
        """
        look, before = self._look(), self._last
        self._last = look
        if look.fault is not None:
            return self._contents() if self._update(look) else None
        if before.fault is not None:
            return None
        settled = {n: s for n, s in look.files.items() if before.files.get(n) == s}
        # A file that only one poll missed may just be being replaced.
        missed = before.files.keys() - look.files.keys()
        return self._contents() if self._update(look, settled, missed) else None

    def _look(self) -> _Look:
        try:
            directory = open_directory(self.path, self._owners)
            try:
                files = list_files(directory)
            finally:
                os.close(directory)
        except Untrusted as refused:
            return _Look(fault=str(refused))
        except OSError as error:
            return _Look(fault=f"the directory cannot be read: {error.strerror}")
        return _Look(files)

    def _update(
        self,
        look: _Look,
        settled: dict[str, Signature] | None = None,
        missed: frozenset[str] | set[str] = frozenset(),
    ) -> bool:
        """Apply a poll's findings. Returns whether anything changed."""
        settled = look.files if settled is None else settled
        gone = self._files.keys() - look.files.keys() - missed
        changed = bool(gone) or self._fault != look.fault
        self._fault = look.fault
        for name in gone:
            del self._files[name]
        stale = {n: s for n, s in settled.items() if self._signature(n) != s}
        if stale:
            changed = self._read_all(stale) or changed
        return changed

    def _signature(self, name: str) -> Signature | None:
        known = self._files.get(name)
        return known.signature if known is not None else None

    def _read_all(self, files: dict[str, Signature]) -> bool:
        try:
            directory = open_directory(self.path, self._owners)
        except Untrusted:
            return False  # the next poll reports it
        try:
            read = {name: self._read(directory, name, seen) for name, seen in files.items()}
        finally:
            os.close(directory)
        news = [self._keep(name, result) for name, result in read.items()]
        return any(news)

    def _keep(self, name: str, result: _File) -> bool:
        """Store the result of reading a file. Returns whether it differs from the previous one."""
        before = self._files.get(name)
        if before is not None and result.fault == _CHANGED:
            return False  # it is read again once it has settled
        self._files[name] = result
        return before is None or result.fault is None or result.fault != before.fault

    def _read(self, directory: int, name: str, seen: Signature) -> _File:
        try:
            if not name.endswith(SUFFIXES):
                raise FileFault(f"its name must end in one of {', '.join(SUFFIXES)}")
            data, signature = read_file(directory, name, self._owners)
            if signature != seen:
                return _File(None, fault=_CHANGED)
            return _File(seen, tuple(_tools(read_documents(name, data), self._secrets)))
        except (FileFault, Untrusted) as refused:
            return _File(seen, fault=str(refused))
        except OSError as error:
            return _File(None, fault=f"it cannot be read: {error.strerror}")
        except Exception as error:  # a bug in the engine must not keep the other files out
            return _File(seen, fault=f"it could not be understood ({type(error).__name__})")

    def _contents(self) -> DirectoryContents:
        if self._fault is not None:
            return DirectoryContents(faults=(DirectoryFault(None, self._fault),))
        clashes = self._clashes()
        tools: list[RegisteredTool] = []
        faults: list[DirectoryFault] = []
        for name, file in sorted(self._files.items()):
            fault = file.fault or clashes.get(name)
            if fault is None and len(tools) + len(file.tools) > MAX_DEFINITIONS:
                fault = f"with it the directory would hold over {MAX_DEFINITIONS} tools"
            if fault is None:
                tools += file.tools
            else:
                faults.append(DirectoryFault(one_line(ascii(name)[1:-1]), fault))
        return DirectoryContents(tuple(tools), tuple(faults))

    def _clashes(self) -> dict[str, str]:
        """Return, by file, a conflict of its tools with those of another file or source."""
        clashes: dict[str, str] = {}
        first: dict[str, str] = {}
        for file, read in sorted(self._files.items()):
            for tool in read.tools:
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


def _tools(documents: list[JsonObject], secrets: SecretBindings) -> list[RegisteredTool]:
    tools: dict[str, RegisteredTool] = {}
    faults: list[str] = []
    for position, document in enumerate(documents):
        try:
            tool = _tool(document, secrets)
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


def _tool(document: JsonObject, secrets: SecretBindings) -> RegisteredTool:
    if document.get("type") not in TYPES:
        raise InvalidDefinition(
            str(document.get("name", "")),
            ["type: a file can define only tools of type REST and MCP"],
        )
    return tool_of_document(document, Source.DIRECTORY, secrets)


def _which(position: int, documents: list[JsonObject]) -> str:
    """Return how a fault refers to one of a file's definitions."""
    name = documents[position].get("name")
    named = f"{name[:64]!a}" if isinstance(name, str) else "a tool without a name"
    return named if len(documents) == 1 else f"{named} (number {position + 1})"


def read_documents(name: str, data: bytes) -> list[JsonObject]:
    """Parse the definitions in a file. Its name's suffix decides the format.

    Raises:
        FileFault: the data is not of this format, or has no definitions.
    """
    return _documents(read_values(name, data))


def _documents(value: Any) -> list[JsonObject]:
    if isinstance(value, dict) and "tools" in value:
        others = sorted(value.keys() - {"tools"})
        if others:
            raise FileFault(f"beside 'tools' there is {others[0][:40]!a}")
        value = value["tools"]
        if not isinstance(value, list):
            raise FileFault("'tools' is not a list of definitions")
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MAX_DEFINITIONS:
        raise FileFault(f"it holds {len(listed)} tools; at most {MAX_DEFINITIONS} are read in all")
    if not all(isinstance(item, dict) for item in listed):
        raise FileFault("neither a definition, nor a list of definitions, nor {'tools': [...]}")
    return listed
