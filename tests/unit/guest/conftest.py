"""Keeps the recursion limit of the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """Warming up may raise the limit of the process, which here is everybody's."""
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)
