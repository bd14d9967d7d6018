"""Makes tar archives for images. Their members are owned by root, and only root can write to
them.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import IO

from fumehood.sandbox.images.recipe import ABOUT, GUEST_HOME, Recipe, guest_files


def guest_archive(about: bytes = b"{}") -> bytes:
    """Return a tar archive that contains the guest and the file that describes the image. `about`
    is the content of this file, as JSON. The archive must be unpacked at the root of a file system.

    All members are owned by root, and only root can write to them.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folders = {GUEST_HOME, str(Path(ABOUT).parent)}
        for path, _ in guest_files():
            folders.update(f"{GUEST_HOME}/{parent}" for parent in Path(path).parents[:-1])
        for folder in sorted(folders):
            add_folder(archive, folder)
        for path, content in guest_files():
            add_file(archive, f"{GUEST_HOME}/{path}", content)
        add_file(archive, ABOUT, about)
    return buffer.getvalue()


def recipe_archive(recipe: Recipe) -> bytes:
    """Return a tar archive of the recipe's files. The members are owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in recipe.files:
            add_file(archive, name, content)
    return buffer.getvalue()


def add_file(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    """Add a file with this path and content to the archive. The file is owned by root, and only
    root can write to it.
    """
    add_stream(archive, path, io.BytesIO(content), len(content))


def add_stream(archive: tarfile.TarFile, path: str, content: IO[bytes], size: int) -> None:
    """Add a file with this path to the archive. Its content is `size` bytes, read from `content`.
    The file is owned by root, and only root can write to it.
    """
    member = tarfile.TarInfo(path)
    member.size = size
    archive.addfile(member, content)


def add_folder(archive: tarfile.TarFile, path: str) -> None:
    """Add a folder with this path to the archive. The folder is owned by root, and only root can
    write to it.
    """
    member = tarfile.TarInfo(path)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(member)
