"""A new file for what comes from an engine: whole, or not there.

Client side. Invariant: a file that was there before is not touched, and no link is followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path) -> Iterator[Callable[[bytes], object]]:
    """A file that is made here; yields what writes to it. It goes again where that fails.

    Raises:
        FileExistsError: something stands there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file.write
    except BaseException:
        path.unlink(missing_ok=True)
        raise
