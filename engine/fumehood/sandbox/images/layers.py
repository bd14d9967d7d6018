"""The layers of an image: Debian's packages, those of the Python index, and the guest.

Host side, between `build` and Docker. Invariant: a layer's labels come with its content, and say
by digests what it was made from; what stands on a root file system does not pass for one.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import docker

from fumehood.sandbox.images.builder import builder, run
from fumehood.sandbox.images.catalog import (
    BASE,
    GUEST,
    GUEST_MB,
    IMAGE,
    LANGUAGES,
    PACKAGES,
    PACKAGES_FROM,
    RECIPE,
    REPOSITORY,
    ROOT,
)
from fumehood.sandbox.images.errors import ImageTrouble, trouble_in
from fumehood.sandbox.images.index import fetch
from fumehood.sandbox.images.recipe import FONTS, SITE, Recipe, guest_archive, guest_digest
from fumehood.sandbox.images.rootfs import OnStep, make_root, make_root_from_base
from fumehood.sandbox.images.site import write_site

GUEST_DEADLINE_S = 60
PACKAGES_DEADLINE_S = 600

NEEDED_BYTES = 1 << 30
"""The file system twice (unpacked and as an archive) and what Docker makes of it."""

MANIFEST = "opt/fumehood/manifest.txt"
PATH = "/usr/local/bin:/usr/bin:/bin"
SETTINGS = (f"ENV PATH={PATH} LANG=C.UTF-8", "WORKDIR /workspace")

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
"""Runs in a container without a network: what is imported here runs code of the packages."""


def find_base(client: docker.APIClient, recipe: Recipe) -> str | None:
    """What the guest of this image goes on top of; None where it has to be made."""
    if not recipe.lock.packages:
        return _find_root(client, recipe, newer_than=0)
    rows = client.images(
        name=f"{REPOSITORY}/base-{recipe.name}", filters={"label": f"{RECIPE}={recipe.digest}"}
    )
    return str(rows[0]["Id"]) if rows else None


def make_base(
    client: docker.APIClient, recipe: Recipe, on_step: OnStep, newer_than: float, cache: Path
) -> str:
    """Make that, on a root file system whose packages are not older than a moment.

    Raises:
        ImageTrouble: with the cure.
    """
    # Fetched first: it is what fails most easily, and needs no rights.
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
        raise trouble_in("Docker did not import the root file system", [str(answer)])
    made = _find_root(client, recipe, newer_than=0)
    if made is None:
        raise ImageTrouble("Docker lost the base that it has just taken.", "Build it again.")
    return made


def _require_room(directory: Path) -> None:
    if shutil.disk_usage(directory).free < NEEDED_BYTES:
        raise trouble_in("Before the build", ["not enough free space"])


def _count_packages(root: Path) -> int:
    with tarfile.open(root) as archive:
        for member in archive:
            if member.name.removeprefix("./") == MANIFEST:
                manifest = archive.extractfile(member)
                return len(manifest.read().splitlines()) if manifest is not None else 0
    raise ImageTrouble("The root file system has no manifest.", "See `finish` of the image.")


def _add_packages(
    client: docker.APIClient, recipe: Recipe, root: str, wheels: list[Path], on_step: OnStep
) -> str:
    """Put the packages of the Python index on a root file system, compiled by its own Python."""
    on_step(f"unpacking packages of the Python index: {len(wheels)}")
    command = ["/usr/bin/python3", "-I", "-c", _FINISH_SITE, *recipe.settings.preload]
    with (
        tempfile.TemporaryDirectory(prefix="fumehood-image-") as directory,
        builder(client, root, command, run_s=PACKAGES_DEADLINE_S) as container,
    ):
        _require_room(Path(directory))
        site = Path(directory) / "site.tar"
        write_site(wheels, recipe.lock.text, site)
        with site.open("rb") as file:
            if not client.put_archive(container, "/", file):
                raise ImageTrouble("Docker did not take the packages.", "Build it again.")
        site.unlink()
        on_step("compiling them")
        run(
            client, container, run_s=PACKAGES_DEADLINE_S,
            failed="The packages do not work in the image",
        )  # fmt: skip
        # Counted with those of Debian: what may need a security update.
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


def _label_of(client: docker.APIClient, image: str, label: str) -> int:
    return int(client.inspect_image(image)["Config"]["Labels"][label])


def add_guest(client: docker.APIClient, recipe: Recipe, base: str, on_step: OnStep) -> str:
    """Put the guest on top, and what the image says of itself. The image's own Python compiles
    it.

    Raises:
        ImageTrouble: with the cure.
    """
    on_step("adding the guest")
    with builder(client, base, _COMPILE_GUEST, run_s=GUEST_DEADLINE_S) as container:
        if not client.put_archive(container, "/", guest_archive(recipe.about)):
            raise ImageTrouble("Docker did not take the guest's files.", "Build it again.")
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
    # Engines of two versions share a host, and so do operators with an image of one name each:
    # the one's build does not leave the other's nameless.
    tag = f"{guest[:12]}-{recipe.digest[:12]}"
    client.tag(made, f"{REPOSITORY}/{recipe.name}", tag=tag)
    return str(made)


def _label_line(labels: Mapping[str, str]) -> str:
    return "LABEL " + " ".join(f'"{key}"="{value}"' for key, value in labels.items())
