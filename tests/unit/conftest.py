"""Property tests never look at the clock, and leave no files behind; a database in memory.

The hash of approvers' secrets costs next to nothing here; daemons in other tests pay its price.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fumehood.identity import credential_hashes
from fumehood.storage.database import Database, open_database

credential_hashes.SCRYPT_N = 2

settings.register_profile(
    "unit", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture
def database() -> Iterator[Database]:
    opened = open_database(None)
    yield opened
    opened.close()
