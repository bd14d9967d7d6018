"""Wheels as a tar archive to be unpacked into an image: root's, and writable by nobody else.

Host side. A wheel is unpacked here and nothing of it is run; what would run while it is installed,
a wheel does not have. Invariant: every member lies below the image's folder for packages, and is
a plain file or a folder with the modes that are chosen here.
"""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from fumehood.sandbox.images.errors import ImageTrouble
from fumehood.sandbox.images.recipe import LOCKED, SITE

PATH_FILE = "usr/lib/python3/dist-packages/fumehood.pth"
"""By which a Python that a program starts finds the packages, too; Debian's own looks there."""

MAX_BYTES = 4 << 30
MAX_FILES = 200_000

_PLACES = ("purelib", "platlib")
"""What of a wheel's `.data` folder belongs beside its packages; the rest, programs and headers,
is left out. *Source*: the wheel format, PEP 427.
"""

TESTED = frozenset({"matplotlib", "mpl_toolkits", "numpy", "pandas"})
"""Packages whose folders of tests are left out: half of their size, and used by nothing."""


def write_site(wheels: Iterable[Path], lock: str, target: Path) -> None:
    """Write the archive to `target`, with the lock beside the packages as a record.

    Raises:
        ImageTrouble: a wheel is no wheel, or holds what it may not.
    """
    folders: set[str] = set()
    files: set[str] = set()
    size = 0
    with tarfile.open(target, "w") as archive:
        _add(archive, LOCKED, lock.encode())
        _add(archive, PATH_FILE, f"/{SITE}\n".encode())
        for wheel in wheels:
            for path, content in _files(wheel):
                if path in files:  # the first one stays, as two packages may bring one file
                    continue
                size += len(content)
                files.add(path)
                if size > MAX_BYTES or len(files) > MAX_FILES:
                    raise ImageTrouble(
                        f"The packages unpack to more than {MAX_BYTES >> 30} GB or {MAX_FILES} "
                        "files.",
                        "Ask for fewer.",
                    )
                _add_folders(archive, path, folders)
                _add(archive, path, content)


def _files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Where each file goes in the image, and what is in it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if member.is_dir():
                    continue
                place = _place(wheel, member)
                if place is not None:
                    yield f"{SITE}/{place}", archive.read(member)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ImageTrouble(
            f"{wheel.name} cannot be unpacked ({error}).", "Remove it from the cache."
        ) from None


def _place(wheel: Path, member: zipfile.ZipInfo) -> PurePosixPath | None:
    name = member.filename
    path = PurePosixPath(name)
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG) or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ImageTrouble(
            f"{wheel.name} holds {name[:80]!r}, which is no file below its own folder.",
            "Leave this package out, and tell who publishes it.",
        )
    parts = path.parts
    if parts[0].endswith(".data"):
        if len(parts) < 3 or parts[1] not in _PLACES:
            return None
        parts = parts[2:]
    if parts[0] in TESTED and "tests" in parts[1:-1]:
        return None
    return PurePosixPath(*parts)


def _add_folders(archive: tarfile.TarFile, path: str, known: set[str]) -> None:
    above = [str(parent) for parent in PurePosixPath(path).parents if str(parent) not in known]
    for folder in reversed(above[:-1]):  # the last one is the root itself
        known.add(folder)
        if folder.startswith(SITE):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)


def _add(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    member = tarfile.TarInfo(path)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))
