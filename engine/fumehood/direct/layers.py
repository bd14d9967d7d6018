"""The files of image layers: their directories, archives and digests.

Host side, standard library only, blocking. The launcher runs each of these functions in a process
of its own, because the files belong to the users of sandboxes, whom an ordinary user's engine
cannot act for. Invariants: a directory that has the name of a layer is complete, and was made by
this module; what is in a layer was written by this module or by an isolated build step.

The name of a layer is a digest of its content, its labels and the layer below. To notice a change,
`check` does not read the files again, but compares a digest of their names, sizes and times with
the one that was taken when the layer was finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ABOUT = "layer.json"
"""Name of the file that describes a layer: its labels, the layer below, and its digests."""

FILES = "files"
"""Name of the directory with the files of a layer."""

WORK = "work"
"""Name of the directory that overlayfs uses while a build step changes the files of a layer."""

PREFIX = "sha256:"
"""How the id of a layer begins. The name of its directory follows."""

UNFINISHED_S = 3600
"""Seconds after which what a killed build has left is removed."""

_LAYER = re.compile("[0-9a-f]{64}")
_NEW = re.compile(r"\.new-[0-9a-f]{16}")


class Refused(Exception):
    """A request that is not carried out. `kind` is `missing`, `changed`, `removal` or `failed`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Layers:
    """The layers in the directory `home`. `ids` are the first user id of sandboxes, and their
    number.
    """

    def __init__(self, home: str, ids: tuple[int, int]) -> None:
        self._home = Path(home)
        self._ids = ids
        self._first = ids[0]

    def do(self, name: str, arguments: Mapping[str, Any], file: IO[bytes] | None) -> dict[str, Any]:
        """Carry out the request `name`, and return the answer. `file` is the archive that is read
        or written.

        Raises:
            Refused: the request is refused. Nothing is left of it.
        """
        if name not in REQUESTS:
            raise Refused("failed", f"unknown request {name!r}")
        call: Callable[..., dict[str, Any]] = getattr(self, name)
        if name not in WITH_FILE:
            return call(**arguments)
        try:
            return call(file, **arguments)
        except (tarfile.TarError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Refused("changed", f"The archive is invalid: {error}") from None

    def new(self, file: IO[bytes], folders: Sequence[str]) -> dict[str, Any]:
        """Make an unfinished layer from the files in the tar archive `file`. Return the name of its
        directory. `folders` are made if they are missing.
        """
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._home / f".new-{secrets.token_hex(8)}"
        new.mkdir(mode=0o700)
        try:
            for name, mode in ((FILES, 0o755), (WORK, 0o700)):
                (new / name).mkdir(mode=mode)
            os.chown(new / FILES, self._first, self._first)
            with tarfile.open(fileobj=file, mode="r|*") as archive:
                self._extract(archive, new / FILES)
            for path in folders:
                self._make_folder(new / FILES, Path(path))
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return {"new": new.name}

    def discard(self, new: str) -> dict[str, Any]:
        """Remove an unfinished layer. Do nothing if it does not exist."""
        shutil.rmtree(self._unfinished(new), ignore_errors=True)
        return {}

    def finish(self, new: str, below: str | None, labels: Mapping[str, str]) -> dict[str, Any]:
        """Finish a layer that is based on the layer `below`, and return its id.

        Raises:
            Refused: with the kind `removal` if the layer hides files of the layer below.
        """
        made = self._unfinished(new)
        files = made / FILES
        if any(_is_removal(path) for path in files.rglob("*")):
            raise Refused("removal", "The layer removes files of the image below.")
        shutil.rmtree(made / WORK, ignore_errors=True)
        base = self._about(below) if below is not None else None
        size = sum(path.stat().st_size for path in files.rglob("*") if _is_file(path))
        all_labels = {**(base["labels"] if base else {}), **labels}
        about = {
            "below": below,
            "labels": all_labels,
            "created": time.time(),
            "size_bytes": size + (base["size_bytes"] if base else 0),
            "stamp": stamp_of(files),
        }
        (made / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        name = self._digest(files, below, all_labels)
        self._publish(made, name)
        return {"layer": PREFIX + name}

    def check(self, layers: Sequence[str]) -> dict[str, Any]:
        """Check that the files of these layers are those that were built.

        Raises:
            Refused: with the kind `missing` or `changed`.
        """
        for layer in layers:
            about = self._about(layer)
            directory = self._directory(layer)
            if stamp_of(directory / FILES) != about["stamp"]:
                raise Refused("changed", f"The files in {directory} were changed.")
        return {}

    def remove(self, layer: str) -> dict[str, Any]:
        """Remove a layer, unless a sandbox uses it. Return whether it was removed."""
        directory = self._directory(layer)
        try:
            with locked(directory) as is_unused:
                if not is_unused:
                    return {"removed": False}
                gone = self._home / f".gone-{secrets.token_hex(8)}"
                directory.rename(gone)
        except FileNotFoundError:
            return {"removed": True}
        shutil.rmtree(gone, ignore_errors=True)
        return {"removed": True}

    def sweep(self) -> dict[str, Any]:
        """Remove what killed builds have left behind."""
        with suppress(FileNotFoundError):
            for path in self._home.iterdir():
                if path.name.startswith("."):
                    with suppress(FileNotFoundError):
                        is_old = time.time() - path.stat().st_mtime > UNFINISHED_S
                        if is_old or path.name.startswith(".gone-"):
                            with locked(path) as is_unused:
                                if is_unused:
                                    shutil.rmtree(path, ignore_errors=True)
        return {}

    def save(self, file: IO[bytes], layers: Sequence[str]) -> dict[str, Any]:
        """Write layers to `file`, as a tar archive. In it, the owner 0 is the root of sandboxes."""

        def of_a_sandbox(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid, member.gid = (max(0, n - self._first) for n in (member.uid, member.gid))
            member.uname = member.gname = ""
            return member

        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for layer in layers:
                directory = self._directory(layer)
                archive.add(directory, directory.name, filter=of_a_sandbox)
        return {}

    def load(self, file: IO[bytes]) -> dict[str, Any]:
        """Add the layers in the tar archive `file`, which `save` has written.

        Raises:
            Refused: with the kind `changed` if the content of a layer does not have the digest in
                its name.
        """
        name = self.new(file, [])["new"]
        try:
            files = self._home / name / FILES
            for directory in list(files.iterdir()):
                about = _about_of(directory)
                digest = self._digest(directory / FILES, about["below"], about["labels"])
                if digest != directory.name:
                    raise Refused("changed", "The archive contains a layer that was changed.")
                (directory / ABOUT).unlink()
                os.chown(directory, os.geteuid(), os.getegid())
                (directory / ABOUT).write_text(json.dumps(about), encoding="utf-8")
                self._publish(directory, digest)
        finally:
            self.discard(name)
        return {}

    # -- directories -------------------------------------------------------------------

    def _directory(self, layer: str) -> Path:
        name = layer.removeprefix(PREFIX)
        if not _LAYER.fullmatch(name):
            raise Refused("missing", f"The layer {layer[:100]!r} does not exist.")
        return self._home / name

    def _unfinished(self, new: str) -> Path:
        if not _NEW.fullmatch(new):
            raise Refused("failed", f"{new[:100]!r} is not an unfinished layer.")
        return self._home / new

    def _about(self, layer: str) -> dict[str, Any]:
        about = read_about(self._directory(layer))
        if about is None:
            raise Refused("missing", f"The layer {layer} does not exist.")
        return about

    def _publish(self, directory: Path, name: str) -> None:
        """Give a finished directory the name `name`. If this layer exists and is intact, keep it
        and remove the new one. Otherwise the new one replaces it.
        """
        directory.chmod(0o700)  # no user of the host sees the files of images
        target = self._home / name
        about = read_about(target)
        if about is not None and stamp_of(target / FILES) == about["stamp"]:
            shutil.rmtree(directory, ignore_errors=True)
            return
        with suppress(FileNotFoundError):
            target.rename(self._home / f".gone-{secrets.token_hex(8)}")  # `sweep` removes it
        directory.rename(target)

    def _extract(self, archive: tarfile.TarFile, target: Path) -> None:
        """Extract an archive into an empty directory. Devices are left out, because a sandbox has
        its own. No file gets the right to change its user.

        Raises:
            Refused: a member would be outside `target`, or is written through a link, or its owner
                is not one of a sandbox.
        """
        first, count = self._ids

        def checked(member: tarfile.TarInfo) -> tarfile.TarInfo:
            names = [(member.name, False), *([(member.linkname, True)] if member.islnk() else [])]
            shown = repr(member.name[:200])
            if any(_leads_elsewhere(target, *name) for name in names):
                raise Refused("changed", f"The archive contains {shown}, which leads outside.")
            if member.islnk() and not (target / member.linkname).is_file():
                raise Refused("changed", f"The archive contains {shown}, a link to nothing.")
            if not (0 <= member.uid < count and 0 <= member.gid < count):
                raise Refused("changed", f"The owner of {shown} is not one of a sandbox.")
            self._make_folder(target, Path(member.name).parent)  # an archive may leave folders out
            member.uid, member.gid = first + member.uid, first + member.gid
            member.mode &= 0o1777
            return member

        # Each member is checked when all members before it are extracted.
        members = (checked(one) for one in archive if _is_kept(one))
        # Python 3.11.2 knows no filters, and Python 3.14 has another default.
        trusting = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(  # noqa: S202 - `checked` checks each member
            target,
            members,
            numeric_owner=True,
            **trusting,  # type: ignore[arg-type]
        )

    def _make_folder(self, files: Path, path: Path) -> None:
        """Make a directory and those above it below `files`, if they are missing. Their owner is
        the root of sandboxes.
        """
        if path.parts and _leads_elsewhere(files, str(path), True):
            raise Refused("changed", f"The archive has something else at {str(path)!r}.")
        for folder in [*reversed(path.parents), path]:
            if not (files / folder).exists():
                (files / folder).mkdir()
                os.chown(files / folder, self._first, self._first)

    def _digest(self, files: Path, below: str | None, labels: Mapping[str, Any]) -> str:
        """Return a digest of a layer: of its files and their properties, its labels, and the id of
        the layer below.
        """
        digest = hashlib.sha256(repr((below, sorted(labels.items()))).encode())
        for path, found in _walk(files):
            owner = (found.st_uid - self._first, found.st_gid - self._first)
            digest.update(repr((path, found.st_mode, *owner)).encode())
            if stat.S_ISREG(found.st_mode):
                with (files / path).open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            elif stat.S_ISLNK(found.st_mode):
                digest.update(str((files / path).readlink()).encode())
        return digest.hexdigest()


REQUESTS = frozenset(
    {"new", "discard", "finish", "check", "remove", "sweep", "save", "load"}
)  # fmt: skip
"""The requests to `Layers`: names of its methods."""

WITH_FILE = frozenset({"new", "save", "load"})
"""The requests that come with an open archive."""


def _about_of(directory: Path) -> dict[str, Any]:
    """Return the description of a layer that was extracted from an archive, and is untrusted.

    Raises:
        Refused: this is not a layer.
    """
    files, file = directory / FILES, directory / ABOUT
    kinds = [path.lstat().st_mode if os.path.lexists(path) else 0 for path in (directory, files)]
    if not all(map(stat.S_ISDIR, kinds)) or file.is_symlink() or not file.is_file():
        raise Refused("changed", "The archive contains something other than layers.")
    if any(_is_removal(path) for path in files.rglob("*")):
        raise Refused("changed", "The archive contains a layer that hides files.")
    found = json.loads(file.read_text(encoding="utf-8"))
    below = found["below"]
    if below is not None and not _LAYER.fullmatch(str(below).removeprefix(PREFIX)):
        raise Refused("changed", "The archive contains a layer with a wrong description.")
    return {
        "below": below,
        "labels": {str(name): str(value) for name, value in found["labels"].items()},
        "created": min(max(0.0, float(found["created"])), time.time()),
        "size_bytes": int(found["size_bytes"]),
        "stamp": stamp_of(files),
    }


def read_about(directory: Path) -> dict[str, Any] | None:
    """Return the description of the layer in a directory, or None if it has none."""
    try:
        about: dict[str, Any] = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about


def stamp_of(files: Path) -> str:
    """Return a digest of the names, sizes and times of all files below `files`. Nobody can change a
    file without changing the time of this change.
    """
    digest = hashlib.sha256()
    for path, found in _walk(files):
        row = (path, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns)
        digest.update(repr((*row, found.st_ctime_ns)).encode())
    return digest.hexdigest()


def _walk(files: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and the properties of everything below `files`, in order."""
    for folder, folders, names in os.walk(files):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = Path(folder, name)
            yield str(path.relative_to(files)), path.lstat()


def _is_kept(member: tarfile.TarInfo) -> bool:
    return member.isreg() or member.isdir() or member.issym() or member.islnk()


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _is_removal(path: Path) -> bool:
    """Whether overlayfs has noted at this path that something below was removed. *Source*: Linux,
    Documentation/filesystems/overlayfs.rst, whiteouts and opaque directories.
    """
    if stat.S_ISCHR(path.lstat().st_mode):
        return True
    for kind in ("trusted", "user"):
        with suppress(OSError):
            if os.getxattr(path, f"{kind}.overlay.opaque", follow_symlinks=False):
                return True
    return False


def _leads_elsewhere(target: Path, name: str, with_last: bool) -> bool:
    """Return whether a member's name leads out of `target`, or through a link. `with_last` says
    whether the last component may not be a link either.
    """
    parts = Path(name).parts
    if not parts:
        return False  # the directory itself
    if parts[0] == "/" or ".." in parts:
        return True
    path = target
    for part in parts if with_last else parts[:-1]:
        path /= part
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(path.lstat().st_mode) and (path.is_symlink() or part != parts[-1]):
                return True
    # A file with this name replaces a link, and must not be written through it.
    return not with_last and (target / name).is_symlink()


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Lock a layer's directory, unless a launcher uses it. Yield whether it is locked.

    Raises:
        FileNotFoundError: the layer does not exist.
    """
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(opened)
