"""Build an image in three layers: Debian packages, Python packages, and the guest.

Host side, between the command line and Docker. A layer that exists with the right labels is not
built again: a root file system takes half a minute and seldom changes, and images with the same
Debian packages share one. Invariants: a layer's labels are set together with its content and
identify its sources by digests, so an interrupted build leaves nothing that looks finished, and an
image built on a root file system is never taken for one. Wheels are unpacked here without running
anything in them; their members become plain files and folders below the folder for packages, owned
by root and writable only by root.

Build steps run in containers without a network, capabilities or another user's files. Each has a
deadline in its name, so the next build removes what a killed one left behind.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import docker

from fumehood.sandbox.container.docker_api import DockerError, typed_errors
from fumehood.sandbox.images.catalog import (
    BASE,
    GUEST,
    GUEST_MB,
    IMAGE,
    LANGUAGES,
    LAYER_BASE,
    LAYERS,
    PACKAGES,
    PACKAGES_FROM,
    RECIPE,
    REPOSITORY,
    ROOT,
    Image,
    layer_tag,
    list_images,
    remove_unused,
    replaced_by,
)
from fumehood.sandbox.images.index import PackagesRefused, fetch
from fumehood.sandbox.images.recipe import (
    ABOUT,
    FONTS,
    LAYER,
    LOCKED,
    SITE,
    Lock,
    Recipe,
    add_file,
    add_folder,
    add_stream,
    guest_archive,
    guest_digest,
)
from fumehood.sandbox.images.rootfs import (
    ImageBuildError,
    OnStep,
    build_error,
    make_root,
    make_root_from_base,
)

DEADLINE_S = 300
"""Seconds for one request to Docker; the slowest one imports a root file system."""

GUEST_DEADLINE_S = 60
"""Seconds to compile the guest."""

PACKAGES_DEADLINE_S = 600
"""Seconds to compile the Python packages."""

LAYER_DEADLINE_S = 120
"""Seconds to compile those that callers ask for."""

NEEDED_BYTES = 1 << 30
"""Free bytes that a build needs: the root file system, unpacked and as an archive, and Docker's
copy."""

MANIFEST = "opt/fumehood/manifest.txt"
"""The list of Debian packages in a root file system, one in each line."""

PATH = "/usr/local/bin:/usr/bin:/bin"
SETTINGS = (f"ENV PATH={PATH} LANG=C.UTF-8", "WORKDIR /workspace")
"""Dockerfile instructions for every layer."""

_COMPILE_GUEST = (
    "/usr/bin/python3", "-I", "-S", "-m", "compileall", "-q",
    "--invalidation-mode", "unchecked-hash", "/opt/fumehood/fumehood",
)  # fmt: skip

_FINISH_SITE = f"""\
import compileall, importlib, os, py_compile, sys
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
# What does not compile is for another version of Python, and nothing here imports it.
compileall.compile_dir("/{SITE}", quiet=2, workers=0, invalidation_mode=mode)
sys.path.append("/{SITE}")
sys.dont_write_bytecode = True
if os.path.isdir("/{SITE}/matplotlib"):
    # It reads its fonts once here, so that nobody waits for it later.
    os.environ["MPLCONFIGDIR"] = "/{FONTS}"
    importlib.import_module("matplotlib.font_manager")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"{{name}} of `preload` in image.toml: {{type(error).__name__}}: {{error}}")
"""
"""Python script that compiles the installed packages and imports those to be preloaded. It runs in
a container without a network, because importing packages runs their code.
"""

_FINISH_LAYER = f"""\
import compileall, py_compile
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
compileall.compile_dir("/{LAYER}", quiet=2, workers=0, invalidation_mode=mode)
"""
"""The same for packages that callers ask for, of which nothing is imported."""

PATH_FILE = "usr/lib/python3/dist-packages/fumehood.pth"
"""File, read by Debian's Python, that adds the packages to the import path of every Python process
that a program starts.
"""

LAYER_PATH_FILE = "usr/lib/python3/dist-packages/fumehood-packages.pth"
"""The same for the packages that callers ask for, which come after all others."""

MAX_SITE_BYTES = 4 << 30
"""Maximum size of the unpacked Python packages of an image, in bytes."""

MAX_SITE_FILES = 200_000
"""Maximum number of files in the Python packages of an image."""

_DATA_FOLDERS = ("purelib", "platlib")
"""Parts of a wheel's `.data` folder that are installed beside its packages. Its scripts and
headers are left out. *Source*: the wheel format, PEP 427.
"""

TESTED = frozenset(
    ("matplotlib", "mpl_toolkits", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "statsmodels")
)
"""Packages whose test folders are left out, because these are up to half of the size."""


@dataclass(frozen=True, slots=True)
class Built:
    """A built image, and which of its layers this build made."""

    image: Image
    made_base: bool
    made_guest: bool


def build_image(
    client: docker.APIClient,
    recipe: Recipe,
    on_step: OnStep,
    *,
    force: bool = False,
    since: float = math.inf,
    cache: Path | None = None,
    own: Path | None = None,
) -> Built:
    """Build the layers of an image that are missing or out of date.

    With `force`, rebuild all of them, except a root file system made after `since` (Unix time):
    one command may build several images that share it.

    Wheels are cached in `cache`; `own` is the folder of the operator's own recipes.

    Raises:
        ImageBuildError: a step failed; the message names the remedy. Existing images are unchanged.
    """
    try:
        with typed_errors():
            sweep_builders(client)
            ready = None if force else _ready(client, recipe, own)
            if ready is not None:
                return Built(ready, made_base=False, made_guest=False)
            replaced = replaced_by(client, recipe)
            base = None if force else find_base(client, recipe)
            made_base = base is None
            if base is None:
                newer_than = since if force else 0.0
                base = make_base(client, recipe, on_step, newer_than, cache or wheel_cache())
            identifier = add_guest(client, recipe, base, on_step)
            found = list_images(client, recipe.name, own=own)
            image = next(i for i in found if i.id == identifier)
            remove_unused(client, replaced - {identifier, base})
            return Built(image, made_base=made_base, made_guest=True)
    except DockerError as error:
        raise build_error("The build", [str(error)]) from None
    except OSError as error:
        raise build_error("The image cannot be written", [str(error)]) from None


def wheel_cache() -> Path:
    """Return the directory of wheels downloaded from the Python index."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "fumehood" / "wheels"


def _ready(client: docker.APIClient, recipe: Recipe, own: Path | None) -> Image | None:
    """Return the existing image with this recipe and guest, or None, without reading the folder."""
    wanted = (recipe.digest, guest_digest())
    found = list_images(client, recipe.name, own=own)
    return next((image for image in found if (image.recipe, image.guest) == wanted), None)


# -- layers ---------------------------------------------------------------------------------


def find_base(client: docker.APIClient, recipe: Recipe) -> str | None:
    """Return the id of the layer below the guest, or None if it has to be built."""
    if not recipe.lock.packages:
        return _find_root(client, recipe, newer_than=0)
    rows = client.images(
        name=f"{REPOSITORY}/base-{recipe.name}", filters={"label": f"{RECIPE}={recipe.digest}"}
    )
    return str(rows[0]["Id"]) if rows else None


def make_base(
    client: docker.APIClient, recipe: Recipe, on_step: OnStep, newer_than: float, cache: Path
) -> str:
    """Build the layer below the guest, and return its id.

    A root file system is reused if its packages were installed after `newer_than` (Unix time).

    Raises:
        ImageBuildError: a step failed; the message names the remedy.
    """
    # Fetch first: this is most likely to fail, and needs no privileges.
    wheels = fetch(recipe.lock, recipe.release, cache, on_step) if recipe.lock.packages else []
    root = _find_root(client, recipe, newer_than=newer_than)
    root = root or _make_root(client, recipe, on_step)
    return _add_packages(client, recipe, root, wheels, on_step) if wheels else root


def _find_root(client: docker.APIClient, recipe: Recipe, *, newer_than: float) -> str | None:
    rows = client.images(
        name=_root_tag(recipe)[0], filters={"label": f"{ROOT}={recipe.root_digest}"}
    )
    fresh = [row for row in rows if int(row["Labels"].get(PACKAGES_FROM, 0)) >= newer_than]
    newest = max(fresh, key=lambda row: int(row["Labels"][PACKAGES_FROM]), default=None)
    return None if newest is None else str(newest["Id"])


def _root_tag(recipe: Recipe) -> tuple[str, str]:
    return f"{REPOSITORY}/root", recipe.root_digest[:12]


def _make_root(client: docker.APIClient, recipe: Recipe, on_step: OnStep) -> str:
    with tempfile.TemporaryDirectory(prefix="fumehood-image-") as directory:
        _require_room(Path(directory))
        root = Path(directory) / "root.tar"
        if recipe.base:
            make_root_from_base(client, recipe, root, on_step)
        else:
            make_root(recipe, root, on_step)
        labels = {
            IMAGE: "root",
            ROOT: recipe.root_digest,
            BASE: recipe.base,
            PACKAGES: str(_count_packages(root)),
            PACKAGES_FROM: str(int(time.time())),
        }
        on_step("importing it into Docker")
        repository, tag = _root_tag(recipe)
        with root.open("rb") as file:
            answer = client.import_image(
                src=file,
                repository=repository,
                tag=tag,
                changes=[*SETTINGS, _label_line(labels)],
            )
    if '"error"' in str(answer):
        raise build_error("Docker did not import the root file system", [str(answer)])
    made = _find_root(client, recipe, newer_than=0)
    if made is None:
        raise ImageBuildError("Docker lost the base that it has just taken.", "Build it again.")
    return made


def _require_room(directory: Path) -> None:
    if shutil.disk_usage(directory).free < NEEDED_BYTES:
        raise build_error("Before the build", ["not enough free space"])


def _count_packages(root: Path) -> int:
    with tarfile.open(root) as archive:
        for member in archive:
            if member.name.removeprefix("./") == MANIFEST:
                manifest = archive.extractfile(member)
                return len(manifest.read().splitlines()) if manifest is not None else 0
    raise ImageBuildError("The root file system has no manifest.", "See `finish` of the image.")


def _add_packages(
    client: docker.APIClient, recipe: Recipe, root: str, wheels: list[Path], on_step: OnStep
) -> str:
    """Add Python packages to a root file system, and compile them with its own Python."""
    on_step(f"unpacking packages of the Python index: {len(wheels)}")
    command = ["/usr/bin/python3", "-I", "-c", _FINISH_SITE, *recipe.settings.preload]
    with (
        tempfile.TemporaryDirectory(prefix="fumehood-image-") as directory,
        builder(client, root, command, run_s=PACKAGES_DEADLINE_S) as container,
    ):
        _require_room(Path(directory))
        site = Path(directory) / "site.tar"
        with tarfile.open(site, "w") as archive:
            add_file(archive, LOCKED, recipe.lock.text.encode())
            add_file(archive, PATH_FILE, f"/{SITE}\n".encode())
            write_site(archive, wheels, SITE)
        with site.open("rb") as file:
            if not client.put_archive(container, "/", file):
                raise ImageBuildError("Docker did not take the packages.", "Build it again.")
        site.unlink()
        on_step("compiling them")
        run(
            client, container, run_s=PACKAGES_DEADLINE_S,
            failed="The packages do not work in the image",
        )  # fmt: skip
        # The label counts them together with Debian's: all may need security updates.
        count = _label_of(client, root, PACKAGES) + len(wheels)
        labels = {
            IMAGE: f"base-{recipe.name}", RECIPE: recipe.digest, ROOT: "", PACKAGES: str(count),
        }  # fmt: skip
        on_step("handing it to Docker")
        made = client.commit(
            container,
            repository=f"{REPOSITORY}/base-{recipe.name}",
            tag=recipe.digest[:12],
            changes=[*SETTINGS, "CMD []", _label_line(labels)],
        )["Id"]
    return str(made)


def add_layer(
    client: docker.APIClient, base: Image, recipe: Recipe, lock: Lock, cache: Path
) -> str:
    """Add the packages that callers ask for to an image, and return the id of the new image.

    Raises:
        PackagesRefused, ImageBuildError: the packages cannot be had or unpacked.
    """
    wheels = fetch(lock, recipe.release, cache, lambda step: None)
    about = json.loads(replace(recipe, lock=Lock(recipe.lock.packages + lock.packages)).about)
    about |= {
        "site_paths": [f"/{SITE}"] if recipe.lock.packages else [],
        "late_paths": [f"/{LAYER}"],
    }
    command = ("/usr/bin/python3", "-I", "-S", "-c", _FINISH_LAYER)
    with (
        tempfile.TemporaryFile() as site,
        builder(client, base.id, command, run_s=LAYER_DEADLINE_S) as container,
    ):
        with tarfile.open(fileobj=site, mode="w") as archive:
            add_file(archive, ABOUT, json.dumps(about, sort_keys=True).encode())
            add_file(archive, LAYER_PATH_FILE, f"/{LAYER}\n".encode())
            write_site(archive, wheels, LAYER)
        site.seek(0)
        if not client.put_archive(container, "/", site):
            raise ImageBuildError("Docker did not take the packages.", "Try again.")
        run(client, container, run_s=LAYER_DEADLINE_S, failed="The packages cannot be compiled")
        made = client.commit(
            container,
            repository=LAYERS,
            tag=layer_tag(base.id, lock),
            changes=[*SETTINGS, "CMD []", _label_line({LAYER_BASE: base.id})],
        )
    return str(made["Id"])


def _label_of(client: docker.APIClient, image: str, label: str) -> int:
    return int(client.inspect_image(image)["Config"]["Labels"][label])


def add_guest(client: docker.APIClient, recipe: Recipe, base: str, on_step: OnStep) -> str:
    """Add the guest and the image's description, and return the image's id.

    The image's own Python compiles the guest.

    Raises:
        ImageBuildError: a step failed; the message names the remedy.
    """
    on_step("adding the guest")
    with builder(client, base, _COMPILE_GUEST, run_s=GUEST_DEADLINE_S) as container:
        if not client.put_archive(container, "/", guest_archive(recipe.about)):
            raise ImageBuildError("Docker did not take the guest's files.", "Build it again.")
        run(
            client, container, run_s=GUEST_DEADLINE_S,
            failed="The image's Python does not compile the guest",
        )  # fmt: skip
        guest = guest_digest()
        labels = {
            IMAGE: recipe.name,
            RECIPE: recipe.digest,
            ROOT: "",
            GUEST: guest,
            LANGUAGES: ",".join(recipe.settings.languages),
            GUEST_MB: str(recipe.settings.guest_mb),
        }
        made = client.commit(
            container,
            repository=f"{REPOSITORY}/{recipe.name}",
            tag="latest",
            changes=[*SETTINGS, "CMD []", _label_line(labels)],
        )["Id"]
    # A second tag, because `latest` moves: engines of other versions, or operators with an image of
    # the same name, may share this host, and an image without a tag is not found.
    tag = f"{guest[:12]}-{recipe.digest[:12]}"
    client.tag(made, f"{REPOSITORY}/{recipe.name}", tag=tag)
    return str(made)


def _label_line(labels: Mapping[str, str]) -> str:
    return "LABEL " + " ".join(f'"{key}"="{value}"' for key, value in labels.items())


# -- packages of the Python index ----------------------------------------------------------


_NOT_UNPACKED = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError,
)  # fmt: skip
"""What `zipfile` raises for a damaged or encrypted archive."""


def write_site(archive: tarfile.TarFile, wheels: Iterable[Path], folder: str) -> None:
    """Unpack wheels into a folder of a tar archive.

    Raises:
        PackagesRefused: a file is not a wheel, a member is not a plain file below its own folder,
            or the packages are too large.
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
                    if size > MAX_SITE_BYTES or len(files) > MAX_SITE_FILES:
                        raise PackagesRefused(
                            f"The packages unpack to more than {MAX_SITE_BYTES >> 30} GB or "
                            f"{MAX_SITE_FILES} files.",
                            "Ask for fewer.",
                        )
                    _add_folders(archive, folder, place, folders)
                    with packed.open(member) as content:
                        add_stream(archive, path, content, member.file_size)
        except _NOT_UNPACKED as error:
            raise PackagesRefused(
                f"{wheel.name} cannot be unpacked ({error}).", "Remove it from the cache."
            ) from None


def _wheel_place(wheel: Path, member: zipfile.ZipInfo) -> PurePosixPath | None:
    if member.is_dir():
        return None
    name = member.filename
    path = PurePosixPath(name)
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG) or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise PackagesRefused(
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


NAME = "fumehood-builder-"
"""Name prefix of build containers, before a deadline and a random part."""

LIFETIME_S = 600
"""Seconds after its command's deadline for which a build container is left alone."""

MEMORY = "1g"
PROCESSES = 64
"""The limits of a build container."""


@contextmanager
def builder(
    client: docker.APIClient, image: str, command: Sequence[str], *, run_s: float
) -> Iterator[str]:
    """Create a container for a command that takes at most `run_s` seconds, and yield its id.

    The container is not started. It is removed when the block ends.
    """
    host = client.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=MEMORY,
        pids_limit=PROCESSES,
    )
    made = client.create_container(
        image,
        command=list(command),
        host_config=host,
        name=f"{NAME}{int(time.time() + LIFETIME_S + run_s)}-{secrets.token_hex(4)}",
    )
    try:
        yield made["Id"]
    finally:
        client.remove_container(made["Id"], force=True)


def run(client: docker.APIClient, container: str, *, run_s: float, failed: str) -> None:
    """Start a container and wait for its command to succeed.

    Raises:
        ImageBuildError: the command failed. The message has `failed` and its last output lines.
    """
    client.start(container)
    status = client.wait(container, timeout=run_s)["StatusCode"]
    if status != 0:
        said = client.logs(container, tail=5).decode("utf-8", "replace")
        raise build_error(failed, said.splitlines())


def sweep_builders(client: docker.APIClient) -> None:
    """Remove build containers whose deadline has passed: their build was killed."""
    for row in client.containers(all=True, filters={"name": NAME}):
        deadline = re.fullmatch(rf"/{NAME}(\d+)-[0-9a-f]+", row["Names"][0])
        if deadline is not None and int(deadline[1]) < time.time():
            client.remove_container(row["Id"], force=True)
