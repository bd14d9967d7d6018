"""A directory of definitions that a test writes to."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.definitions import rest_document


class DefinitionDirectory:
    """Writes files with given modes, independent of the umask."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, name: str, content: Any, mode: int = 0o600) -> Path:
        """Write bytes or a value as JSON, atomically."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        unfinished = self.path / f".{name}"
        unfinished.write_bytes(data)
        unfinished.chmod(mode)
        return unfinished.rename(self.path / name)

    def put_tools(self, name: str, *tools: str, **fields: Any) -> Path:
        """Write a file of valid REST tools with these names."""
        return self.put(name, {"tools": [rest_document(name=tool, **fields) for tool in tools]})

    def remove(self, name: str) -> None:
        (self.path / name).unlink()


@contextmanager
def definition_directory() -> Iterator[DefinitionDirectory]:
    """A private directory, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="fh-tools-", dir="/tmp"))
    try:
        yield DefinitionDirectory(path)
    finally:
        path.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
