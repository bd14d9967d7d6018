"""A keyring in a JSON file, for tests: a backend of the package `keyring` like any other."""

from __future__ import annotations

import json
import os
from pathlib import Path

from keyring.backend import KeyringBackend


class FileKeyring(KeyringBackend):
    """Keeps entries as they are. The file is `FILE_KEYRING` unless another one is given."""

    priority = 1  # type: ignore[assignment]  # the library's own form

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self._path = path if path is not None else Path(os.environ.get("FILE_KEYRING", "/nowhere"))

    def get_password(self, service: str, username: str) -> str | None:
        return self._entries().get(f"{service} {username}")

    def set_password(self, service: str, username: str, password: str) -> None:
        entries = {**self._entries(), f"{service} {username}": password}
        self._path.write_text(json.dumps(entries), encoding="utf-8")

    def _entries(self) -> dict[str, str]:
        if not self._path.exists():
            return {}
        entries: dict[str, str] = json.loads(self._path.read_text(encoding="utf-8"))
        return entries
