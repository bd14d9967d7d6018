"""The images of direct sandboxes: each layer is a directory, and an image is a stack of them.

Host side, blocking. Invariants: a directory that has the name of a layer is complete, and was made
by this module; what is in a layer was written by root or by an isolated build step; a layer that
was changed afterwards is not used; a layer is not removed while a sandbox uses it or another layer
is based on it.

The name of a layer is a digest of its content, its labels and the layer below. To notice a change,
the store does not read the files again, but compares a digest of their names, sizes and times with
the one that was taken when the layer was finished. In a layer, the file owner 0 of an image is the
host's user `FIRST_ID`, who is root in all sandboxes.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from fumehood.core.json_types import JsonObject
from fumehood.direct.ask import launcher_directory, remove_sandbox, run_step, sandboxes_of
from fumehood.direct.plan import FIRST_ID, IDS, MOUNT_POINTS, step_plan
from fumehood.image_store.faults import ImageBuildError, build_error
from fumehood.image_store.store import OnStep, StoredLayer
from fumehood.sandbox.container.runtime import RuntimeFault, RuntimeNotFound, RuntimeUnreachable
from fumehood.sandbox.images.recipe import Recipe

ABOUT = "layer.json"
"""Name of the file that describes a layer: its labels, the layer below, and its digests."""

FILES = "files"
"""Name of the directory with the files of a layer."""

UNFINISHED_S = 3600
"""Seconds after which what a killed build has left is removed."""

STEP = "build-"
"""How the names of build steps' sandboxes begin. A deadline and a random part follow."""

STEP_LIFETIME_S = 600
"""Seconds after the deadline of a build step. Until then, no other build removes its sandbox."""

PREFIX = "sha256:"


class LayerChanged(RuntimeFault):
    """The files of a layer are not those that were built."""

    message = "The files of an image were changed after it was built."
    remedy = "Build it again: fumehood images build NAME --force"
    heals = False


def default_home() -> Path:
    """Return the directory of this user's images."""
    if os.geteuid() == 0:
        return Path("/var/lib/fumehood/layers")
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "fumehood" / "layers"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and the directory in which it is."""

    directory: Path
    about: JsonObject

    @property
    def id(self) -> str:
        return PREFIX + self.directory.name

    @property
    def files(self) -> Path:
        return self.directory / FILES

    @property
    def below(self) -> str | None:
        below: str | None = self.about["below"]
        return below


class DirectoryStore:
    """The layers in the directory `home`. `launcher` is the directory of the launcher that runs
    build steps.
    """

    name = "fumehood"

    def __init__(self, home: Path, launcher: Path) -> None:
        self._home = home
        self._launcher = launcher
        self._checked: set[str] = set()
        """Ids of the layers whose files were compared with their digest."""

    def layers(self, label: str) -> list[StoredLayer]:
        """Return the layers that have the label `label` (`name` or `name=value`), newest first."""
        name, _, value = label.partition("=")
        found = [
            StoredLayer(
                layer.id,
                layer.about["labels"],
                datetime.fromtimestamp(layer.about["created"], UTC),
                layer.about["size_bytes"],
            )
            for layer in self._all()
            if name in layer.about["labels"] and (not value or layer.about["labels"][name] == value)
        ]
        return sorted(found, key=lambda layer: layer.created, reverse=True)

    def directories_of(self, layer: str) -> list[Path]:
        """Return the directories of a layer and of all layers below it, beginning with the lowest.

        Raises:
            RuntimeNotFound: a layer is missing.
            LayerChanged: the files of a layer were changed.
        """
        found: list[Path] = []
        current: str | None = layer
        while current is not None:
            one = self._layer(current)
            if one.id not in self._checked:
                if _stamp(one.files) != one.about["stamp"]:
                    raise LayerChanged(f"The files in {one.directory} were changed.")
                self._checked.add(one.id)
            found.append(one.files)
            current = one.below
        return found[::-1]

    def import_root(self, archive: Path, labels: Mapping[str, str]) -> str:
        """Make a layer from the root file system in the tar file `archive`, and return its id."""
        with self._new() as new, archive.open("rb") as opened:
            _unpack(opened, new / FILES)
            for path in MOUNT_POINTS:
                _make_folder(new / FILES, Path(path))
            return self._finish(new, None, labels)

    def root_from_base(self, recipe: Recipe, context: bytes, target: Path, on_step: OnStep) -> None:
        """Refuse to use an image of a registry.

        Raises:
            ImageBuildError: always.
        """
        raise ImageBuildError(
            "Images of a registry cannot be used here.",
            "Leave --base out, or set container.engine to docker.",
        )

    def add(
        self,
        below: str,
        files: IO[bytes],
        command: Sequence[str],
        *,
        labels: Mapping[str, str],
        run_s: float,
        failed: str,
    ) -> str:
        """Make a layer on the layer `below`: unpack the tar archive `files`, and run `command` in a
        sandbox without network and capabilities. Return the new layer's id.

        Raises:
            ImageBuildError: the command failed. The message begins with `failed`.
        """
        directories = self.directories_of(below)
        with _in_use(directories), self._new() as new:
            _unpack(files, new / FILES)
            (new / "work").mkdir()
            name = f"{STEP}{int(time.time() + run_s + STEP_LIFETIME_S)}-{secrets.token_hex(4)}"
            plan = step_plan(name, command, directories, upper=new / FILES, work=new / "work")
            ended = run_step(self._launcher, plan, run_s)
            if ended.exit_code != 0:
                raise build_error(failed, ended.output.splitlines())
            if any(_is_removal(path) for path in (new / FILES).rglob("*")):
                raise build_error(failed, ["it removed files of the image below"])
            shutil.rmtree(new / "work")
            return self._finish(new, self._layer(below), labels)

    def remove(self, layer: str) -> bool:
        """Remove the layer with this id, unless a sandbox uses it or another layer is based on it.
        Return whether it was removed.
        """
        if any(other.below == layer for other in self._all()):
            return False
        try:
            directory = self._layer(layer).directory
        except RuntimeNotFound:
            return True
        with _locked(directory) as is_unused:
            if not is_unused:
                return False
            gone = self._home / f".gone-{secrets.token_hex(8)}"
            directory.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def users_of(self, layer: str) -> list[str]:
        """Return the names of the sandboxes that use this layer."""
        return [one["name"] for one in self._sandboxes() if one["image_id"] == layer]

    def _sandboxes(self) -> list[JsonObject]:
        try:
            return sandboxes_of(self._launcher)
        except OSError as error:
            raise RuntimeUnreachable(f"The launcher cannot be reached: {error}") from None

    def sweep(self) -> None:
        """Remove what killed builds have left behind."""
        for one in self._sandboxes():
            deadline = re.fullmatch(rf"{STEP}(\d+)-[0-9a-f]+", one["name"])
            if deadline is not None and int(deadline[1]) < time.time():
                with suppress(OSError):
                    remove_sandbox(self._launcher, one["name"])
        with suppress(FileNotFoundError):
            for path in self._home.iterdir():
                if path.name.startswith("."):
                    with suppress(FileNotFoundError):
                        is_old = time.time() - path.stat().st_mtime > UNFINISHED_S
                        if is_old or path.name.startswith(".gone-"):
                            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Do nothing: the store has no connection."""

    def save(self, layer: str, file: IO[bytes]) -> None:
        """Write a layer and all layers below it to `file`, as a tar archive."""
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for directory in (files.parent for files in self.directories_of(layer)):
                archive.add(directory, directory.name, filter=_of_a_sandbox)

    def load(self, file: IO[bytes]) -> None:
        """Add the layers in the tar archive `file`, which `save` has written. A layer whose content
        does not have the digest in its name is refused.

        Raises:
            LayerChanged: a layer was changed, or the file is not such an archive.
        """
        try:
            self._load(file)
        except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise LayerChanged(f"The archive is invalid: {error}") from None

    def _load(self, file: IO[bytes]) -> None:
        with self._new() as new:
            with tarfile.open(fileobj=file, mode="r|") as archive:
                _extract(archive, new, FIRST_ID)
            for directory in [path for path in new.iterdir() if (path / ABOUT).is_file()]:
                about = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
                name = _digest(directory / FILES, about["below"], about["labels"])
                if name != directory.name:
                    raise LayerChanged("The archive contains a layer that was changed.")
                about["stamp"] = _stamp(directory / FILES)
                (directory / ABOUT).unlink()
                os.chown(directory, os.geteuid(), os.getegid())
                (directory / ABOUT).write_text(json.dumps(about), encoding="utf-8")
                self._publish(directory, name)

    # -- directories -------------------------------------------------------------------

    def _all(self) -> Iterator[_Layer]:
        with suppress(FileNotFoundError):
            for directory in self._home.iterdir():
                if re.fullmatch("[0-9a-f]{64}", directory.name):
                    with suppress(RuntimeNotFound):
                        yield self._layer(PREFIX + directory.name)

    def _layer(self, layer: str) -> _Layer:
        directory = self._home / layer.removeprefix(PREFIX)
        try:
            return _Layer(directory, json.loads((directory / ABOUT).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise RuntimeNotFound(f"The layer {layer} does not exist.") from None

    @contextmanager
    def _new(self) -> Iterator[Path]:
        """Provide a new directory for a layer. It is removed afterwards, unless it was renamed."""
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._home / f".new-{secrets.token_hex(8)}"
        new.mkdir(mode=0o700)
        (new / FILES).mkdir(mode=0o755)
        os.chown(new / FILES, FIRST_ID, FIRST_ID)
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _finish(self, new: Path, below: _Layer | None, labels: Mapping[str, str]) -> str:
        """Give the layer in the directory `new` its name, and return its id."""
        files = new / FILES
        all_labels = {**(below.about["labels"] if below is not None else {}), **labels}
        size = sum(path.stat().st_size for path in files.rglob("*") if _is_file(path))
        about = {
            "below": None if below is None else below.id,
            "labels": all_labels,
            "created": time.time(),
            "size_bytes": size + (0 if below is None else below.about["size_bytes"]),
            "stamp": _stamp(files),
        }
        (new / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        name = _digest(files, None if below is None else below.id, all_labels)
        self._publish(new, name)
        return PREFIX + name

    def _publish(self, directory: Path, name: str) -> None:
        """Give a finished directory the name `name`. If this layer exists and is intact, keep it.
        Otherwise the new one replaces it.
        """
        directory.chmod(0o700)  # no user of the host sees the files of images
        target = self._home / name
        if target.exists():
            with suppress(RuntimeNotFound):
                there = self._layer(PREFIX + name)
                if _stamp(there.files) == there.about["stamp"]:
                    return
            target.rename(self._home / f".gone-{secrets.token_hex(8)}")  # `sweep` removes it
            self._checked.discard(PREFIX + name)
        directory.rename(target)


def _extract(archive: tarfile.TarFile, target: Path, first_id: int) -> None:
    """Extract an archive whose owners are numbered from `first_id` into an empty directory. Devices
    are left out, because a sandbox has its own. No file gets the right to change its user.

    Raises:
        LayerChanged: a member would be outside `target`, or is written through a link, or its owner
            is not one of a sandbox.
    """

    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        names = [(member.name, False), *([(member.linkname, True)] if member.islnk() else [])]
        if any(_leads_elsewhere(target, *name) for name in names):
            raise LayerChanged(f"The archive contains {member.name[:200]!r}, which leads outside.")
        owner, group = member.uid - first_id, member.gid - first_id
        if not (0 <= owner < IDS and 0 <= group < IDS):
            raise LayerChanged(f"The owner of {member.name[:200]!r} is not one of a sandbox.")
        _make_folder(target, Path(member.name).parent)  # an archive may leave folders out
        return member.replace(
            uid=FIRST_ID + owner, gid=FIRST_ID + group, uname="", gname="",
            mode=member.mode & 0o1777, deep=False,
        )  # fmt: skip

    archive.extractall(target, numeric_owner=True, filter=checked)  # noqa: S202 - `checked` checks


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


def _make_folder(files: Path, path: Path) -> None:
    """Make a directory and those above it below `files`, if they are missing. Their owner is the
    root of sandboxes.
    """
    for folder in [*reversed(path.parents), path]:
        if not (files / folder).exists():
            (files / folder).mkdir()
            os.chown(files / folder, FIRST_ID, FIRST_ID)


def _of_a_sandbox(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make the owner of a layer's directory and description one that `_extract` accepts."""
    is_of_store = member.uid < FIRST_ID
    return member.replace(uid=FIRST_ID, gid=FIRST_ID, deep=False) if is_of_store else member


def _unpack(archive: IO[bytes], target: Path) -> None:
    with tarfile.open(fileobj=archive, mode="r|*") as opened:
        _extract(opened, target, 0)


def _is_removal(path: Path) -> bool:
    """Whether overlayfs has noted at this path that something below was removed. *Source*: Linux,
    Documentation/filesystems/overlayfs.rst, whiteouts and opaque directories.
    """
    if stat.S_ISCHR(path.lstat().st_mode):
        return True
    with suppress(OSError):
        return bool(os.getxattr(path, "trusted.overlay.opaque", follow_symlinks=False))
    return False


@contextmanager
def _in_use(directories: Sequence[Path]) -> Iterator[None]:
    """Keep the layers with these directories from being removed during the block."""
    locks = [
        os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in directories
    ]
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _walk(files: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and the properties of everything below `files`, in order."""
    for folder, folders, names in os.walk(files):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = Path(folder, name)
            yield str(path.relative_to(files)), path.lstat()


def _stamp(files: Path) -> str:
    """Return a digest of the names, sizes and times of all files below `files`. Nobody can change a
    file without changing the time of this change.
    """
    digest = hashlib.sha256()
    for path, found in _walk(files):
        row = (path, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns)
        digest.update(repr((*row, found.st_ctime_ns)).encode())
    return digest.hexdigest()


def _digest(files: Path, below: str | None, labels: Mapping[str, Any]) -> str:
    """Return a digest of a layer: of its files and their properties, its labels, and the id of the
    layer below.
    """
    digest = hashlib.sha256(repr((below, sorted(labels.items()))).encode())
    for path, found in _walk(files):
        digest.update(repr((path, found.st_mode, found.st_uid, found.st_gid)).encode())
        if stat.S_ISREG(found.st_mode):
            with (files / path).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        elif stat.S_ISLNK(found.st_mode):
            digest.update(str((files / path).readlink()).encode())
    return digest.hexdigest()


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a layer's directory, unless a launcher uses it. Yield whether it is locked."""
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


def open_store() -> DirectoryStore:
    """Return the store of this user's images."""
    return DirectoryStore(default_home(), launcher_directory())
