"""Loads the calculator before its tests: it hides NumPy, which Hypothesis would stumble over."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import fumehood.guest.interpreter.calculator as _loaded

for _name in ("numpy", "numpy_financial"):
    if sys.modules.get(_name, _loaded) is None:
        del sys.modules[_name]


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """Warming up may raise the limit of the process, which here is everybody's."""
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)
