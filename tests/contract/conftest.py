"""Fixtures of the kernel's contract. They are all that it has: `tests/conftest.py` needs parts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home() -> Iterator[Path]:
    """A private state directory with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)
