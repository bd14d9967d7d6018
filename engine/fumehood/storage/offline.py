"""The database of a state directory, read beside a running engine or without one.

Host side, for the command line. Invariant: nothing is written, made or migrated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError

from fumehood.storage.database import FILE_NAME
from fumehood.storage.errors import ReadFailed
from fumehood.storage.opening import in_words, open_to_read


@contextmanager
def reading(state: Path) -> Iterator[Connection]:
    """A connection that reads.

    Raises:
        StoreError: there is none that could be read.
    """
    engine = open_to_read(state / FILE_NAME)
    try:
        with engine.connect() as connection:
            yield connection
    except DatabaseError as error:
        raise ReadFailed(in_words(error)) from error
    finally:
        engine.dispose()


__all__ = ["reading"]
