"""Unpacks wheels into a tar archive, as a process with limits. Usage: `python -m … FOLDER TARGET
WHEEL…`.

Host side. Nothing in a wheel is run. The members of wheels become regular files and folders below
FOLDER. They are owned by root, and only root can write to them. This module imports neither Docker
nor pip. If a wheel is refused, the process prints the cause and the remedy as one line of JSON, and
ends with the exit status `REFUSED`.
"""

from __future__ import annotations

import json
import resource
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from fumehood.images.archive import add_folder, add_stream

REFUSED = 3
"""The exit status of the process if a wheel is refused."""

MAX_MEMORY_BYTES = 1 << 30
"""Maximum memory of the process in bytes."""

MAX_SITE_BYTES = 4 << 30
"""Maximum total size in bytes of an image's unpacked Python packages."""

MAX_SITE_FILES = 200_000
"""Maximum number of files and folders in an image's Python packages."""

_DATA_FOLDERS = ("purelib", "platlib")
"""Those subfolders of a wheel's `.data` folder that are installed beside the wheel's packages.
Other subfolders, such as scripts and headers, are left out. *Source*: the wheel format, PEP 427.
"""

TESTED = frozenset(
    ("matplotlib", "mpl_toolkits", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "statsmodels")
)
"""Packages whose folders of tests are left out, because tests are up to half of their size."""


class Refused(Exception):
    """A wheel is refused. `args` contains the cause and the remedy."""


_NOT_UNPACKED = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError,
)  # fmt: skip
"""The exceptions that `zipfile` raises for a damaged or encrypted archive."""


def write_site(archive: tarfile.TarFile, wheels: Iterable[Path], folder: str) -> None:
    """Add the contents of the wheels to the tar archive, below the folder `folder`.

    Raises:
        Refused: a file is not a readable wheel, a member is not a regular file below the folder, or
            the packages are too large.
    """
    folders: set[str] = set()
    files: set[str] = set()
    size = 0
    add_folder(archive, folder)
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as packed:
                for member in packed.infolist():
                    place = _wheel_place(wheel, member)
                    path = f"{folder}/{place}"
                    if place is None or path in files:  # of two equal paths, the first one is kept
                        continue
                    size += member.file_size
                    files.add(path)
                    if size > MAX_SITE_BYTES or len(files) + len(folders) > MAX_SITE_FILES:
                        raise Refused(
                            f"The packages unpack to more than {MAX_SITE_BYTES >> 30} GB or "
                            f"{MAX_SITE_FILES} files.",
                            "Ask for fewer.",
                        )
                    _add_folders(archive, folder, place, folders)
                    with packed.open(member) as content:
                        add_stream(archive, path, content, member.file_size)
        except _NOT_UNPACKED as error:
            raise Refused(
                f"{wheel.name} cannot be unpacked ({error}).", "Remove it from the cache."
            ) from None


def _wheel_place(wheel: Path, member: zipfile.ZipInfo) -> PurePosixPath | None:
    if member.is_dir():
        return None
    name = member.filename
    path = PurePosixPath(name)
    kind = stat.S_IFMT(member.external_attr >> 16)
    is_plain = kind in (0, stat.S_IFREG) and not path.is_absolute() and path.parts
    if not is_plain or ".." in path.parts or "\\" in name:
        raise Refused(
            f"{wheel.name} holds {name[:80]!r}, which is not a file below its own folder.",
            "Leave this package out, and tell its publisher.",
        )
    parts = path.parts
    if parts[0].endswith(".data"):
        if len(parts) < 3 or parts[1] not in _DATA_FOLDERS:
            return None
        parts = parts[2:]
    if parts[0] in TESTED and "tests" in parts[1:-1]:
        return None
    return PurePosixPath(*parts)


def _add_folders(archive: tarfile.TarFile, top: str, path: PurePosixPath, known: set[str]) -> None:
    for folder in map(str, reversed(path.parents[:-1])):
        if folder not in known:
            known.add(folder)
            add_folder(archive, f"{top}/{folder}")


def main(folder: str, target: str, *wheels: str) -> int:
    """Unpack the wheels into a new tar archive at `target`, below the folder `folder`. Return the
    exit status of the process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_SITE_BYTES, MAX_SITE_BYTES))
    try:
        with tarfile.open(target, "w") as archive:
            write_site(archive, map(Path, wheels), folder)
    except Refused as refused:
        print(json.dumps(refused.args))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
