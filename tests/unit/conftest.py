"""A cheap hash of approvers' secrets, and a database in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fumehood.identity import credential_hashes
from fumehood.storage.database import Database, open_database


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
