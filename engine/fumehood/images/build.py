"""Builds an image in three layers: Debian packages, Python packages, and the guest.

Host side, between the command line and the store of a container runtime. A layer is not built again
if one with the right labels exists: to build a root file system takes half a minute, it seldom
changes, and images with the same Debian packages share one. Invariants:

* The labels of a layer are set together with its content, and identify its sources by digests. So
  an interrupted build leaves nothing that looks complete, and an image that was built on a root
  file system is never taken for a root file system.
* To unpack a wheel, nothing in it is run. Its members become regular files and folders below the
  folder for packages. They are owned by root, and only root can write to them.

An operator's own image has a recipe folder, which adds packages to a built-in image. The folder is
created under a temporary name. After the image was built, `publish` renames the folder. Invariant:
a folder that has the name of an image is complete, and only its owner can write in it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from fumehood.core.names import IMAGE_NAME
from fumehood.image_store.faults import ImageBuildError, build_error
from fumehood.image_store.find import layer_key, list_images
from fumehood.image_store.store import (
    BASE,
    GUEST,
    GUEST_MB,
    HOST,
    IMAGE,
    LANGUAGES,
    LAYER_BASE,
    LAYER_KEY,
    PACKAGES,
    PACKAGES_FROM,
    RECIPE,
    ROOT,
    ImageStore,
    OnStep,
    StoredLayer,
)
from fumehood.images import unpacking
from fumehood.images.archive import add_file, guest_archive, recipe_archive
from fumehood.images.index import PackagesRefused, fetch, resolve
from fumehood.images.removal import remove_unused, replaced_by
from fumehood.images.requirements import merged, parse_requirements
from fumehood.images.rootfs import make_root, run_program
from fumehood.sandbox.container.runtime import RuntimeFault
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import (
    ABOUT,
    COMMON,
    SITE,
    ImageSettings,
    Lock,
    Recipe,
    WrongRecipe,
    WrongRequirements,
    guest_digest,
    image_names,
    is_debian_package,
    read_recipe,
)

GUEST_DEADLINE_S = 60
"""Maximum seconds for compiling the guest."""

PACKAGES_DEADLINE_S = 600
"""Maximum seconds for compiling the Python packages of an image."""

LAYER_DEADLINE_S = 120
"""Maximum seconds for compiling the packages that callers ask for."""

NEEDED_BYTES = 1 << 30
"""Number of free bytes that a build needs. This is enough for the unpacked root file system, for
its archive, and for the store's copy.
"""

MANIFEST = "opt/fumehood/manifest.txt"
"""Path of the list of Debian packages in a root file system. Each line is one package."""

LAYER = "opt/fumehood/packages"
"""Path of the folder in a package layer that contains the Python packages for calls and
sessions.
"""

LOCKED = "opt/fumehood/requirements.lock"
"""Path of the list of an image's own Python packages. Nothing reads this list; it is for people."""

FONTS = "opt/fumehood/matplotlib"
"""Path of Matplotlib's font cache in an image."""

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
"""Python script that compiles the installed packages, and imports those that `preload` names.
Importing packages runs their code, so the script runs in a container without a network.
"""

_FINISH_LAYER = f"""\
import compileall, py_compile
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
compileall.compile_dir("/{LAYER}", quiet=2, workers=0, invalidation_mode=mode)
"""
"""Python script that compiles the packages that callers ask for. It imports none of them."""

PATH_FILE = "usr/lib/python3/dist-packages/fumehood.pth"
"""Path of a file that Debian's Python reads. The file adds the image's Python packages to the
import path of every Python process that a program starts.
"""

LAYER_PATH_FILE = "usr/lib/python3/dist-packages/fumehood-packages.pth"
"""Path of a file like `PATH_FILE`, for the packages that callers ask for. These packages come last
in the import path.
"""


@dataclass(frozen=True, slots=True)
class Built:
    """The result of `build_image`: the image, and which of its layers this call has built.

    `made_base` is True if this call built the image on which the guest layer is based. `made_guest`
    is True if it built the guest layer. They are False for a layer that already existed.
    """

    image: Image
    made_base: bool
    made_guest: bool


def build_image(
    store: ImageStore,
    recipe: Recipe,
    on_step: OnStep,
    *,
    force: bool = False,
    since: float = math.inf,
    cache: Path | None = None,
    own: Path | None = None,
) -> Built:
    """Build those layers of an image that are missing or out of date.

    `on_step` receives a short description of each step when the step begins. `cache` is the
    directory of downloaded wheels, or None for the default. `own` is the folder with the recipes
    that the operator wrote.

    If `force` is True, all layers are built again. There is one exception: a root file system that
    was made after `since` (Unix time) is reused.

    Raises:
        ImageBuildError: a step failed. The message names the remedy. Existing images are unchanged.
    """
    try:
        store.sweep()
        ready = None if force else _ready(store, recipe, own)
        if ready is not None:
            return Built(ready, made_base=False, made_guest=False)
        replaced = replaced_by(store, recipe)
        base = None if force else find_base(store, recipe)
        made_base = base is None
        if base is None:
            # One command can build several images, which then share a new root file system.
            newer_than = since if force else 0.0
            base = make_base(store, recipe, on_step, newer_than, cache or wheel_cache())
        identifier = add_guest(store, recipe, base, on_step)
        found = list_images(store, recipe.name, own=own)
        image = next(i for i in found if i.id == identifier)
        remove_unused(store, replaced - {identifier, base})
        return Built(image, made_base=made_base, made_guest=True)
    except RuntimeFault as error:
        raise build_error("The build", [str(error)]) from None
    except OSError as error:
        raise build_error("The image cannot be written", [str(error)]) from None


def wheel_cache() -> Path:
    """Return the default directory for the wheels that are downloaded from the Python index."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "fumehood" / "wheels"


def _ready(store: ImageStore, recipe: Recipe, own: Path | None) -> Image | None:
    """Return the image that was built from this recipe and the present guest, or None if there is
    none.

    `own` is the folder with the recipes that the operator wrote. The labels of the images name the
    recipe and the guest by their digests.
    """
    wanted = (recipe.digest, guest_digest())
    found = list_images(store, recipe.name, own=own)
    return next((image for image in found if (image.recipe, image.guest) == wanted), None)


# -- layers ---------------------------------------------------------------------------------


def find_base(store: ImageStore, recipe: Recipe) -> str | None:
    """Return the id of the layer that has all packages of `recipe`, but not the guest. Return None
    if this layer does not exist.
    """
    if not recipe.lock.packages:
        root = _find_root(store, recipe, newer_than=0)
        return None if root is None else root.id
    found = store.layers(f"{RECIPE}={recipe.digest}")
    name = f"base-{recipe.name}"
    return next((layer.id for layer in found if layer.labels.get(IMAGE) == name), None)


def make_base(
    store: ImageStore, recipe: Recipe, on_step: OnStep, newer_than: float, cache: Path
) -> str:
    """Build the layer that has all packages of `recipe`, but not the guest, and return the layer's
    id. `on_step` receives a short description of each step when the step begins.

    An existing root file system is used if its packages were installed after `newer_than` (Unix
    time). `cache` is the directory of downloaded wheels.

    Raises:
        ImageBuildError: a step failed. The message names the remedy.
    """
    # The download comes first, because it is the most likely step to fail, and needs no privileges.
    wheels = fetch(recipe.lock, recipe.release, cache, on_step) if recipe.lock.packages else []
    root = _find_root(store, recipe, newer_than=newer_than)
    root = root or _make_root(store, recipe, on_step)
    return _add_packages(store, recipe, root, wheels, on_step) if wheels else root.id


def _find_root(store: ImageStore, recipe: Recipe, *, newer_than: float) -> StoredLayer | None:
    found = store.layers(f"{ROOT}={recipe.root_digest}")
    fresh = [each for each in found if int(each.labels.get(PACKAGES_FROM, 0)) >= newer_than]
    return max(fresh, key=lambda each: int(each.labels[PACKAGES_FROM]), default=None)


def _make_root(store: ImageStore, recipe: Recipe, on_step: OnStep) -> StoredLayer:
    with tempfile.TemporaryDirectory(prefix="fumehood-image-") as directory:
        _require_room(Path(directory))
        root = Path(directory) / "root.tar"
        if recipe.is_of_host:
            store.root_from_host(root)
        elif recipe.base:
            store.root_from_base(recipe, recipe_archive(recipe), root, on_step)
        else:
            make_root(recipe, root, on_step)
        labels = {
            IMAGE: "root",
            ROOT: recipe.root_digest,
            BASE: recipe.base,
            PACKAGES: str(_count_packages(root)),
            PACKAGES_FROM: str(int(time.time())),
            **({HOST: "1"} if recipe.is_of_host else {}),
        }
        on_step(f"importing it into {store.name}")
        identifier = store.import_root(root, labels)
    found = store.layers(f"{ROOT}={recipe.root_digest}")
    return next(layer for layer in found if layer.id == identifier)


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
    store: ImageStore,
    recipe: Recipe,
    root: StoredLayer,
    wheels: list[Path],
    on_step: OnStep,
) -> str:
    """Make a layer that adds the Python packages in `wheels` to the root file system `root`, and
    return the new layer's id. The Python of the root file system compiles the packages.
    """
    on_step(f"unpacking and compiling packages of the Python index: {len(wheels)}")
    # The label counts Debian's packages and these, because all of them may need security updates.
    count = int(root.labels[PACKAGES]) + len(wheels)
    with _unpacked(
        wheels, SITE, {LOCKED: recipe.lock.text, PATH_FILE: f"/{SITE}\n"}, PACKAGES_DEADLINE_S
    ) as site:
        return store.add(
            root.id,
            site,
            ("/usr/bin/python3", "-I", "-c", _FINISH_SITE, *recipe.settings.preload),
            labels={
                IMAGE: f"base-{recipe.name}",
                RECIPE: recipe.digest,
                ROOT: "",
                PACKAGES: str(count),
            },
            run_s=PACKAGES_DEADLINE_S,
            failed="The packages do not work in the image",
        )


@contextmanager
def _unpacked(
    wheels: Sequence[Path], folder: str, files: Mapping[str, str], deadline_s: float
) -> Iterator[IO[bytes]]:
    """Unpack wheels into a temporary tar archive, below the folder `folder` of the archive, in at
    most `deadline_s` seconds. Also add `files`, which maps paths to contents. Yield the archive.
    """
    with tempfile.TemporaryDirectory(prefix="fumehood-image-") as directory:
        _require_room(Path(directory))
        site = Path(directory) / "site.tar"
        unpack(wheels, folder, site, deadline_s)
        with tarfile.open(site, "a") as archive:
            for path, content in files.items():
                add_file(archive, path, content.encode())
        with site.open("rb") as file:
            yield file


def add_layer(store: ImageStore, base: Image, recipe: Recipe, lock: Lock, cache: Path) -> str:
    """Make a layer that adds the packages of `lock` to the image `base`, and return the new layer's
    id. These are packages that callers have requested.

    `recipe` is the recipe of `base`, and `cache` the directory of downloaded wheels.

    Raises:
        PackagesRefused, ImageBuildError: the packages are not available, or cannot be unpacked.
    """
    if recipe.is_of_host:
        raise PackagesRefused(
            f"The image {base.name} has the programs of this host, and gets no packages.",
            "Use another image.",
        )
    wheels = fetch(lock, recipe.release, cache, lambda step: None)
    about = json.loads(replace(recipe, lock=Lock(recipe.lock.packages + lock.packages)).about)
    about |= {
        "site_paths": [f"/{SITE}"] if recipe.lock.packages else [],
        "late_paths": [f"/{LAYER}"],
    }
    files = {ABOUT: json.dumps(about, sort_keys=True), LAYER_PATH_FILE: f"/{LAYER}\n"}
    with _unpacked(wheels, LAYER, files, LAYER_DEADLINE_S) as packages:
        return store.add(
            base.id,
            packages,
            ("/usr/bin/python3", "-I", "-S", "-c", _FINISH_LAYER),
            labels={LAYER_BASE: base.id, LAYER_KEY: layer_key(base.id, lock.text)},
            run_s=LAYER_DEADLINE_S,
            failed="The packages cannot be compiled",
        )


def add_guest(store: ImageStore, recipe: Recipe, base: str, on_step: OnStep) -> str:
    """Add the guest and the description of the image to the layer with the id `base`. Return the id
    of the new image.

    The Python in the image compiles the guest.

    Raises:
        ImageBuildError: a step failed. The message names the remedy.
    """
    on_step("adding the guest")
    return store.add(
        base,
        io.BytesIO(guest_archive(recipe.about)),
        _COMPILE_GUEST,
        labels={
            IMAGE: recipe.name,
            RECIPE: recipe.digest,
            ROOT: "",
            GUEST: guest_digest(),
            LANGUAGES: ",".join(recipe.settings.languages),
            GUEST_MB: str(recipe.settings.guest_mb),
        },
        run_s=GUEST_DEADLINE_S,
        failed="The image's Python does not compile the guest",
    )


# -- packages of the Python index ----------------------------------------------------------


def unpack(wheels: Sequence[Path], folder: str, target: Path, deadline_s: float) -> None:
    """Unpack wheels into a new tar archive at `target`, below the folder `folder` of the archive. A
    separate process with limits does this, in at most `deadline_s` seconds.

    Raises:
        PackagesRefused: the wheels cannot be unpacked, exceed the limits, or take too long.
    """
    # A process of its own is necessary, because anybody can have published the wheels.
    command = [
        sys.executable,
        "-I",
        "-m",
        unpacking.__name__,
        folder,
        str(target),
        *map(str, wheels),
    ]
    status, said = run_program(command, deadline_s=deadline_s)
    if status == unpacking.REFUSED:
        found, remedy = json.loads(said[-1])
        raise PackagesRefused(found, remedy)
    if status != 0:
        raise PackagesRefused(
            "The packages cannot be unpacked within the limits.", "Ask for fewer."
        )


# -- recipes of own images ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """An operator's request for an own image, which adds packages to a built-in image."""

    name: str
    requirements: str
    """The Python packages to add, as the text of a requirements file."""
    debian_packages: tuple[str, ...] = ()
    below: str = "python-data"
    """The name of the built-in image to which the packages are added."""


def is_own_name(name: str) -> bool:
    """Whether an operator may give this name to an image.

    Not allowed are the names of built-in images, and the names of layers.
    """
    taken = name in image_names() or name in (COMMON, "root", "base", "building", "packages")
    return re.fullmatch(IMAGE_NAME, name) is not None and not (
        taken or name.startswith(("base-", "building-"))
    )


def check_request(request: ImageRequest, home: Path, *, replace: bool = False) -> None:
    """Check a request for an own image before anything is downloaded or created. `home` is the
    folder of the operator's images.

    Raises:
        WrongRecipe: a name or a requirement is invalid, or the image exists and `replace` is False.
    """
    if not is_own_name(request.name):
        ours = ", ".join(image_names())
        raise WrongRecipe(
            f"{request.name[:80]!r} cannot be the name of an image of your own: it is made of a-z, "
            f"0-9 and '-', begins with a letter, has 31 characters at most, and is none of {ours}."
        )
    if request.below not in image_names():
        raise WrongRecipe(f"--from takes one of {', '.join(image_names())}.")
    if read_recipe(request.below).is_of_host:
        raise WrongRecipe("--from takes no image that has the programs of this host.")
    for package in request.debian_packages:
        if not is_debian_package(package):
            raise WrongRecipe(f"{package[:80]!r} is not the name of a Debian package.")
    if (home / request.name).exists() and not replace:
        raise WrongRecipe(
            f"There is an image {request.name} already: --replace makes it anew, and "
            f"`fumehood images remove {request.name}` removes it."
        )
    _requirements(read_recipe(request.below), request.requirements)


@contextmanager
def make_aside(request: ImageRequest, home: Path, cache: Path, on_step: OnStep) -> Iterator[Path]:
    """Create the recipe of a requested image in a temporary folder, and yield the folder's path.
    When the `with` block ends, remove the folder, unless `publish` has renamed it.

    `home` is the folder of the operator's images, and `cache` the directory of downloaded wheels.
    `on_step` receives a short description of each step when the step begins.

    Raises:
        ImageBuildError: the Python index did not provide the packages.
        OSError: the folder cannot be written.
    """
    below = read_recipe(request.below)
    asked = _requirements(below, request.requirements)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = Path(tempfile.mkdtemp(prefix=f".{request.name}-", dir=home))
    try:
        lock = resolve(asked, below.release, cache, on_step)
        files = {
            "image.toml": _settings(request, below.settings),
            "packages.txt": "".join(
                f"{name}\n" for name in sorted({*below.packages, *request.debian_packages})
            ),
            "requirements.in": asked,
            "requirements.lock": f"# Locked with hashes, for {os.uname().machine}.\n{lock.text}",
        }
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o644)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, name: str) -> Path:
    """Rename a temporary recipe folder to `name`, the name of its image, and return the new path.
    If a folder with this name exists, it is replaced.
    """
    target = folder.with_name(name)
    folder.chmod(0o755)
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{name}-old-", dir=folder.parent))
        target.replace(old)
        folder.replace(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.replace(target)
    return target


def _requirements(below: Recipe, text: str) -> str:
    """Combine the requirements of the built-in image `below` with those in `text`. Return them as
    the text of one requirements file.

    Raises WrongRecipe if a line of `text` is invalid.
    """
    ours = dict(below.files).get("requirements.in", b"").decode()
    try:
        wanted = parse_requirements(text)
        return merged(parse_requirements(ours), wanted)
    except WrongRequirements as error:
        raise WrongRecipe(f"The list of packages: {error}") from None


def _settings(request: ImageRequest, below: ImageSettings) -> str:
    def names(values: Sequence[str]) -> str:
        return "[" + ", ".join(f'"{value}"' for value in values) + "]"

    return (
        f'release = "{below.release}"\n'
        f'description = "An image of your own, from {request.below}"\n'
        f"languages = {names(below.languages)}\n"
        "# Modules that are imported once, before all programs, so that those have them at once;\n"
        "# and the memory in MB that they take. An idle container holds it.\n"
        f"preload = {names(below.preload)}\n"
        f"guest_mb = {below.guest_mb}\n"
    )
