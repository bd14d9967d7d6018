"""The files of an image of the operator's own, read only where nobody else can have written them.

Host side. Root installs what these files name, so they are as trusted as the configuration.
Invariant: what is read belongs to root or to who runs this, in folders that are theirs, and no
file runs anything: what runs during a build is this package's.
"""

from __future__ import annotations

import os
from pathlib import Path

from fumehood.sandbox.trusted_files import Untrusted, open_directory, read_file

OWN_FILES = ("image.toml", "packages.txt", "requirements.in", "requirements.lock")


def read_own_files(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """All files of the folder that count, sorted by name.

    Raises:
        Untrusted: somebody else could have written one, or one lacks.
    """
    owners = frozenset({0, os.geteuid()})
    directory = open_directory(folder, owners)
    try:
        return tuple((name, _read(directory, name, owners)) for name in OWN_FILES)
    finally:
        os.close(directory)


def _read(directory: int, name: str, owners: frozenset[int]) -> bytes:
    try:
        return read_file(directory, name, owners)[0]
    except Untrusted as error:
        raise Untrusted(f"{name}: {error}") from None
    except OSError as error:
        raise Untrusted(f"{name} cannot be read: {error.strerror}") from None
