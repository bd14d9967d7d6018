"""The audit chain of a state directory, read beside a running engine or without one.

Host side, for the command line. Invariant: nothing is written, not even a key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import dropwhile, takewhile
from pathlib import Path

from fumehood.audit.chain import all_rows
from fumehood.audit.keys import all_keys
from fumehood.audit.verify import Anchor, AuditRow, Verdict, verify
from fumehood.storage.database import reading


def verify_state(
    state: Path, anchors: Iterable[Anchor], keys: Mapping[str, bytes] | None = None
) -> Verdict:
    """Verify the chain of a state directory; by default with its own keys.

    Raises:
        StoreError: database or keys cannot be read.
    """
    known = keys if keys is not None else all_keys(state)
    with reading(state) as connection:
        return verify(all_rows(connection), known, anchors)


@contextmanager
def exported(
    state: Path, since: datetime | None = None, until: datetime | None = None
) -> Iterator[Iterator[AuditRow]]:
    """The rows from the first one at or after `since` to the last before one at or after `until`.

    Contiguous even if the clock jumped, so that it can be verified as a part.

    Raises:
        StoreError: the database cannot be read.
    """
    with reading(state) as connection:
        rows = all_rows(connection)
        if since is not None:
            rows = dropwhile(lambda row: _is_before(row, since), rows)
        if until is not None:
            rows = takewhile(lambda row: _is_before(row, until), rows)
        yield rows


def _is_before(row: AuditRow, moment: datetime) -> bool:
    """Whether the row is earlier; a row without a time is not."""
    try:
        return datetime.fromisoformat(json.loads(row.body)["at"]) < moment
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
