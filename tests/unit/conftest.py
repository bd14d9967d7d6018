"""A cheap hash of approvers' secrets, and a database in memory.

It also loads the calculator before any test does: that hides NumPy, which Hypothesis would stumble
over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import fumehood.guest.interpreter.calculator as _loaded
from fumehood.identity import credential_hashes
from fumehood.storage.database import Database, open_database

for _name in ("numpy", "numpy_financial"):
    if sys.modules.get(_name, _loaded) is None:
        del sys.modules[_name]


@pytest.fixture(autouse=True, scope="module")
def cheap_scrypt() -> Iterator[None]:
    """Hash secrets at next to no cost. Undone after each module: other tests of this process pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(credential_hashes, "SCRYPT_N", 2)
        yield


@pytest.fixture
def database() -> Iterator[Database]:
    opened = open_database(None)
    yield opened
    opened.close()
