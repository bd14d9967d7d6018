"""A directory of definitions: what its files offer now, and what is wrong with which.

Host side. Above it the engine, which puts the tools into the index and looks again twice a
second; below it `trusted_files` (who may have written), `definition_file` (bytes to documents)
and the index's checks. It is looked at, not notified about: that works on every file system,
network ones too, and costs a directory of a thousand files some milliseconds.

Invariants: a file counts whole or not at all. A file that is faulty offers nothing, whatever
it offered before: an operator who took a tool out and mistyped something else must not find it
still there. Where two files offer the same name and version, neither counts, so that no file's
name decides which is served.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolType
from fumehood.registry.definition_file import (
    MAX_DEFINITIONS,
    SUFFIXES,
    FileFault,
    one_line,
    read_documents,
)
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import RegisteredTool, Source, tool_of_document
from fumehood.sandbox.trusted_files import (
    MAX_FILE_BYTES,
    Signature,
    Untrusted,
    list_files,
    open_directory,
    read_file,
)

TYPES = (ToolType.REST, ToolType.MCP)
MAX_TOTAL_BYTES = 64 << 20
MAX_UNSETTLED_LOOKS = 6
"""After so many looks that each saw a file changed, it is a fault: three seconds."""

MAX_FAULTY_SHOWN = 5
"""Faulty definitions of one file that are named in its fault."""


_CHANGED = "it changed while it was read"


@dataclass(frozen=True, slots=True)
class DirectoryFault:
    """A file whose definitions were left out, or None for the directory itself; and why."""

    file: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """What a directory offers at one moment."""

    tools: tuple[RegisteredTool, ...] = ()
    faults: tuple[DirectoryFault, ...] = ()


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look saw: the files by name, or why there are none to be seen."""

    files: dict[str, Signature] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class _File:
    """What reading a file gave. Without a signature it is read again at the next look."""

    signature: Signature | None
    tools: tuple[RegisteredTool, ...] = ()
    fault: str | None = None


class ToolDirectory:
    """The directory at one path. Not for two threads at once.

    `owner_of` says which other source has a name already; such a name is a fault of the file.
    `owners` are the users whose files are trusted: without it, the engine's own and root.
    """

    def __init__(
        self,
        path: Path,
        owner_of: Callable[[str], str | None] = lambda name: None,
        owners: frozenset[int] | None = None,
    ) -> None:
        self.path = path
        self._owner_of = owner_of
        self._owners = owners if owners is not None else frozenset({0, os.geteuid()})
        self._last = _Look()
        self._unsettled: dict[str, int] = {}
        self._files: dict[str, _File] = {}
        self._fault: str | None = None

    def load(self) -> DirectoryContents:
        """Read everything that is there now."""
        self._last = self._look()
        self._update(self._last)
        return self._contents()

    def poll(self) -> DirectoryContents | None:
        """Look again; the contents, where they are not what the last answer said.

        A change counts when two looks after each other saw the same: a file that is being
        written is not read in the middle. A fault of the directory itself counts at once.
        """
        look, before = self._look(), self._last
        self._last = look
        if look.fault is not None:
            return self._contents() if self._update(look) else None
        if before.fault is not None:
            return None
        settled = {n: s for n, s in look.files.items() if before.files.get(n) == s}
        moving = look.files.keys() - settled.keys()
        # A file that one look missed may be about to be replaced; two looks do not err.
        missed = before.files.keys() - look.files.keys()
        return self._contents() if self._update(look, settled, moving, missed) else None

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
        # A larger one is refused without being read.
        sizes = (s.size for s in files.values() if s.size <= MAX_FILE_BYTES)
        if sum(sizes) > MAX_TOTAL_BYTES:
            return _Look(fault=f"the files together are larger than {MAX_TOTAL_BYTES >> 20} MB")
        return _Look(files)

    def _update(
        self,
        look: _Look,
        settled: dict[str, Signature] | None = None,
        moving: frozenset[str] | set[str] = frozenset(),
        missed: frozenset[str] | set[str] = frozenset(),
    ) -> bool:
        """Bring what is known in line with a look; whether that changed anything."""
        settled = look.files if settled is None else settled
        gone = self._files.keys() - look.files.keys() - missed
        changed = bool(gone) or self._fault != look.fault
        self._fault = look.fault
        for name in gone:
            del self._files[name]
        stale = {n: s for n, s in settled.items() if self._signature(n) != s}
        if stale:
            changed = self._read_all(stale) or changed
        self._unsettled = {name: self._unsettled.get(name, 0) + 1 for name in moving}
        for name, looks in self._unsettled.items():
            if looks >= MAX_UNSETTLED_LOOKS:
                fault = _File(None, fault="it keeps changing while it is looked at")
                changed = self._keep(name, fault) or changed
        return changed

    def _signature(self, name: str) -> Signature | None:
        known = self._files.get(name)
        return known.signature if known is not None else None

    def _read_all(self, files: dict[str, Signature]) -> bool:
        try:
            directory = open_directory(self.path, self._owners)
        except Untrusted:
            return False  # the next look finds it out
        try:
            read = {name: self._read(directory, name, seen) for name, seen in files.items()}
        finally:
            os.close(directory)
        news = [self._keep(name, result) for name, result in read.items()]
        return any(news)

    def _keep(self, name: str, result: _File) -> bool:
        """Remember what reading a file gave; whether that is news."""
        before = self._files.get(name)
        if before is not None and result.fault == _CHANGED:
            return False  # it is read again when it has settled
        self._files[name] = result
        return before is None or result.fault is None or result.fault != before.fault

    def _read(self, directory: int, name: str, seen: Signature) -> _File:
        try:
            if not name.endswith(SUFFIXES):
                raise FileFault(f"its name ends in none of {', '.join(SUFFIXES)}")
            data, signature = read_file(directory, name, self._owners)
            if signature != seen:
                return _File(None, fault=_CHANGED)
            return _File(seen, tuple(_tools(read_documents(name, data))))
        except (FileFault, Untrusted) as refused:
            return _File(seen, fault=str(refused))
        except OSError as error:
            return _File(None, fault=f"it cannot be read: {error.strerror}")
        except Exception as error:  # a fault of ours must not keep the other files out
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
        """File → why what it offers cannot stand beside what others offer."""
        clashes: dict[str, str] = {}
        first: dict[str, str] = {}
        for file, read in sorted(self._files.items()):
            for tool in read.tools:
                name, version = tool.definition.name, tool.definition.version
                reference = f"{name}@{version}"
                other = first.setdefault(reference, file)
                if other != file:
                    clashes[file] = f"{reference} is in {other!a} too; neither file counts"
                    clashes[other] = f"{reference} is in {file!a} too; neither file counts"
                owner = self._owner_of(name)
                if owner is not None:
                    clashes[file] = f"the name {name} belongs to a tool of the source {owner!s}"
        return clashes


def _tools(documents: list[JsonObject]) -> list[RegisteredTool]:
    tools: dict[str, RegisteredTool] = {}
    faults: list[str] = []
    for position, document in enumerate(documents):
        try:
            tool = _tool(document)
        except InvalidDefinition as error:
            faults.append(f"{_which(position, documents)}: {'; '.join(error.faults[:5])}")
            if len(faults) == MAX_FAULTY_SHOWN:
                break
            continue
        reference = f"{tool.definition.name}@{tool.definition.version}"
        if reference in tools:
            raise FileFault(f"{reference} is given twice")
        tools[reference] = tool
    if faults:
        raise FileFault(one_line("; ".join(faults), 2000))
    return list(tools.values())


def _tool(document: JsonObject) -> RegisteredTool:
    if document.get("type") not in TYPES:
        raise InvalidDefinition(
            str(document.get("name", "")), ["type: a file brings tools of type REST and MCP only"]
        )
    return tool_of_document(document, Source.DIRECTORY)


def _which(position: int, documents: list[JsonObject]) -> str:
    """How a fault calls one of the file's definitions."""
    name = documents[position].get("name")
    named = f"{name[:64]!a}" if isinstance(name, str) else "a tool without a name"
    return named if len(documents) == 1 else f"{named} (number {position + 1})"
