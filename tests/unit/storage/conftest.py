"""The database fixture of most storage tests: in a file and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fumehood.storage.database import Database, open_database


@pytest.fixture(params=["file", "memory"])
def database(request: pytest.FixtureRequest, home: Path) -> Iterator[Database]:
    opened = open_database(home / "state.db" if request.param == "file" else None)
    yield opened
    opened.close()
