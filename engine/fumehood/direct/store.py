"""The images of direct sandboxes: each layer is a directory, and an image is a stack of them.

Host side, blocking. The launcher reads and writes the files of the layers (`layers.py`), because
they belong to the users of sandboxes; this module reads only their descriptions. Invariants: a
layer that was changed after it was built is not used; a layer is not removed while a sandbox uses
it or another layer is based on it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import UnsupportedOperation
from pathlib import Path
from typing import IO

from fumehood.core.json_types import JsonObject
from fumehood.direct.ask import (
    ask_launcher,
    launcher_directory,
    remove_sandbox,
    run_step,
    sandboxes_of,
)
from fumehood.direct.host_files import PYTHON, python_version, write_skeleton
from fumehood.direct.layers import FILES, PREFIX, WORK, read_about
from fumehood.direct.plan import MOUNT_POINTS, step_plan
from fumehood.image_store.faults import ImageBuildError, build_error
from fumehood.image_store.store import HOST, OnStep, StoredLayer
from fumehood.sandbox.container.runtime import RuntimeFault, RuntimeNotFound, RuntimeUnreachable
from fumehood.sandbox.images.recipe import Recipe

STEP = "build-"
"""How the names of build steps' sandboxes begin. A deadline and a random part follow."""

STEP_LIFETIME_S = 600
"""Seconds after the deadline of a build step. Until then, no other build removes its sandbox."""

REQUEST_S = 600.0
"""Maximum seconds for a request that reads or writes the files of layers."""


class LayerChanged(RuntimeFault):
    """The files of a layer are not those that were built."""

    message = "The files of an image were changed after it was built."
    remedy = "Build it again: fumehood images build NAME --force"
    heals = False


class LayerRemoves(Exception):
    """A build step has removed files of the layer below."""


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
    build steps. With a `starter` (the name of a module), this module starts their sandboxes.
    """

    name = "fumehood"

    def __init__(self, home: Path, launcher: Path, starter: str | None = None) -> None:
        self._home = home
        self._launcher = launcher
        self._starter = starter
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
        stack: list[_Layer] = []
        current: str | None = layer
        while current is not None:
            stack.append(self._layer(current))
            current = stack[-1].below
        unchecked = [one.id for one in stack if one.id not in self._checked]
        if unchecked:
            self._ask("check", layers=unchecked)
            self._checked.update(unchecked)
        return [one.files for one in reversed(stack)]

    def has_host(self, layer: str) -> bool:
        """Return whether a sandbox of this layer has the programs and libraries of this host."""
        return bool(self._layer(layer).about["labels"].get(HOST))

    def import_root(self, archive: Path, labels: Mapping[str, str]) -> str:
        """Make a layer from the root file system in the tar file `archive`, and return its id."""
        with archive.open("rb") as opened, self._new(opened, MOUNT_POINTS) as new:
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

    def root_from_host(self, target: Path) -> None:
        """Write the root file system of the image `host` to the tar file `target`.

        Raises:
            ImageBuildError: this host has no suitable Python.
        """
        if python_version() < (3, 11):
            raise ImageBuildError(
                f"The image host needs {PYTHON} of version 3.11 or later on this host.",
                "Install it with your distribution, or load an image: fumehood images load FILE",
            )
        write_skeleton(target)

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
        with_host = self.has_host(below)
        with _in_use(directories), self._new(files) as new:
            upper, work = (self._home / new / name for name in (FILES, WORK))
            name = f"{STEP}{int(time.time() + run_s + STEP_LIFETIME_S)}-{secrets.token_hex(4)}"
            plan = step_plan(
                name, command, directories, upper=upper, work=work, with_host=with_host,
                is_watched=not self._ask_launcher({"do": "hello"})["cgroups"],
                starter=self._starter,
            )  # fmt: skip
            ended = run_step(self._launcher, plan, run_s)
            if ended.exit_code != 0:
                raise build_error(failed, ended.output.splitlines())
            try:
                return self._finish(new, below, labels)
            except LayerRemoves:
                raise build_error(failed, ["it removed files of the image below"]) from None

    def remove(self, layer: str) -> bool:
        """Remove the layer with this id, unless a sandbox uses it or another layer is based on it.
        Return whether it was removed.
        """
        if any(other.below == layer for other in self._all()):
            return False
        removed: bool = self._ask("remove", layer=layer)["removed"]
        return removed

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
        self._ask("sweep")

    def close(self) -> None:
        """Do nothing: the store has no connection."""

    def save(self, layer: str, file: IO[bytes]) -> None:
        """Write a layer and all layers below it to `file`, as a tar archive."""
        layers = [PREFIX + files.parent.name for files in self.directories_of(layer)]
        with _as_file(file, for_writing=True) as opened:
            self._ask("save", opened, layers=layers)

    def load(self, file: IO[bytes]) -> None:
        """Add the layers in the tar archive `file`, which `save` has written. A layer whose content
        does not have the digest in its name is refused.

        Raises:
            LayerChanged: a layer was changed, or the file is not such an archive.
        """
        with _as_file(file) as opened:
            self._ask("load", opened)
        self._checked.clear()

    # -- directories -------------------------------------------------------------------

    def _all(self) -> Iterator[_Layer]:
        with suppress(FileNotFoundError):
            for directory in self._home.iterdir():
                if re.fullmatch("[0-9a-f]{64}", directory.name):
                    with suppress(RuntimeNotFound):
                        yield self._layer(PREFIX + directory.name)

    def _layer(self, layer: str) -> _Layer:
        directory = self._home / layer.removeprefix(PREFIX)
        about = read_about(directory)
        if about is None:
            raise RuntimeNotFound(f"The layer {layer} does not exist.")
        return _Layer(directory, about)

    @contextmanager
    def _new(self, files: IO[bytes], folders: Sequence[str] = ()) -> Iterator[str]:
        """Provide the name of an unfinished layer with the files of a tar archive. It is removed
        afterwards, unless it was finished.
        """
        with _as_file(files) as opened:
            new = self._ask("new", opened, folders=list(folders))["new"]
        try:
            yield new
        finally:
            self._ask("discard", new=new)

    def _finish(self, new: str, below: str | None, labels: Mapping[str, str]) -> str:
        """Finish the unfinished layer `new`, and return its id."""
        layer: str = self._ask("finish", new=new, below=below, labels=dict(labels))["layer"]
        self._checked.discard(layer)
        return layer

    def _ask(self, call: str, file: IO[bytes] | None = None, **arguments: object) -> JsonObject:
        """Let the launcher carry out a request for the files of layers.

        Raises:
            RuntimeNotFound, LayerChanged, LayerRemoves: see `layers.Layers`.
            OSError: the files cannot be read or written.
        """
        request = {"do": "layers", "call": call, "home": str(self._home), "with": arguments}
        if file is None:
            return self._ask_launcher(request)
        return self._ask_launcher({**request, "offset": file.tell()}, [file.fileno()])

    def _ask_launcher(self, request: JsonObject, descriptors: Sequence[int] = ()) -> JsonObject:
        answer = ask_launcher(self._launcher, request, list(descriptors), REQUEST_S)
        if "error" not in answer:
            return answer
        raise _FAULTS.get(answer["kind"], OSError)(answer["error"])


_FAULTS: Mapping[str, type[Exception]] = {
    "missing": RuntimeNotFound, "changed": LayerChanged, "removal": LayerRemoves,
}  # fmt: skip
"""How the launcher refuses → the error."""


@contextmanager
def _as_file(file: IO[bytes], *, for_writing: bool = False) -> Iterator[IO[bytes]]:
    """Provide an open file of the operating system for `file`, which may be in memory."""
    try:
        file.fileno()
    except UnsupportedOperation:
        pass
    else:
        file.flush()
        yield file
        return
    with tempfile.TemporaryFile() as copied:
        if not for_writing:
            shutil.copyfileobj(file, copied)
            copied.seek(0)
        yield copied
        if for_writing:
            copied.seek(0)
            shutil.copyfileobj(copied, file)


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


def open_store(starter: str | None = None) -> DirectoryStore:
    """Return the store of this user's images. `starter` is the module that starts the sandboxes of
    build steps, or None if the launcher does.
    """
    return DirectoryStore(default_home(), launcher_directory(), starter)
