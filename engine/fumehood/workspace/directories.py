"""Local directories that a client copies into a session, or creates from a session's files.

Client side. Invariants: a directory that is created here appears completely or not at all; no file
is written outside this directory; no file is written or read through a link.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fumehood.client.files import new_file, plain_file
from fumehood.core.workspace_path import path_fault

if TYPE_CHECKING:
    from tarfile import TarFile


@contextmanager
def packed(directory: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that contains a tar archive of a local directory.

    Entries that are neither files nor directories, such as links, are left out.

    Raises:
        OSError: the directory, or an entry in it, cannot be read.
    """
    import tarfile
    import tempfile

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            _pack(archive, directory, "")
        file.seek(0)
        yield file


def _pack(archive: TarFile, directory: Path, prefix: str) -> None:
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            archive.addfile(archive.gettarinfo(entry.path, name))
            _pack(archive, directory / entry.name, f"{name}/")
        elif entry.is_file(follow_symlinks=False):
            with plain_file(directory / entry.name, follow=False) as file:
                member = archive.gettarinfo(arcname=name, fileobj=file)
                member.type, member.size = b"0", os.fstat(file.fileno()).st_size
                archive.addfile(member, file)


@contextmanager
def new_directory(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty temporary file, into which the caller writes a tar archive. When the `with`
    block ends, unpack the archive as the new directory `path`.

    The directory appears completely or not at all. Entries that are neither files nor directories
    are left out.

    Raises:
        FileExistsError: `path` exists and is not an empty directory.
        OSError: the directory cannot be created.
        tarfile.TarError: the temporary file does not contain a tar archive, or an entry of the
            archive has a path that is not plain, such as a path that leads out of the directory.
    """
    import shutil
    import tarfile
    import tempfile

    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "it exists and is not an empty directory", str(path))
    made = path.with_name(f".fumehood-{secrets.token_hex(8)}")
    made.mkdir()
    try:
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    if path_fault(member.name) is not None:
                        raise tarfile.ReadError(f"{member.name[:200]!r} is not a plain path")
                    target = made / member.name  # no component is a link: links are not unpacked
                    if member.isdir():
                        target.mkdir(parents=True, exist_ok=True)
                    elif member.isreg():
                        target.parent.mkdir(parents=True, exist_ok=True)
                        source = archive.extractfile(member)
                        assert source is not None
                        with new_file(target, mode=0o777 if member.mode & 0o100 else 0o666) as copy:
                            shutil.copyfileobj(source, copy)
        made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
