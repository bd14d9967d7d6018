"""Building an image: the base, which takes a minute and seldom changes, and the guest on top.

Host side. Above it the command line; below it `rootfs` and Docker. What is there already and
carries the right labels is not built again. Invariant: an image gets its labels together with
its content, so a build that was broken off leaves nothing that looks finished.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import APIError, DockerException
from requests.exceptions import RequestException

from fumehood.sandbox.container.images import (
    BASE,
    GUEST,
    GUEST_MB,
    IMAGE,
    LANGUAGES,
    PACKAGES,
    PACKAGES_FROM,
    RECIPE,
    REPOSITORY,
    Image,
    list_images,
    newest_own,
)
from fumehood.sandbox.container.recipe import Recipe, guest_archive, guest_digest
from fumehood.sandbox.container.rootfs import OnStep, make_root, make_root_from_base
from fumehood.sandbox.container.trouble import ImageTrouble, trouble_in

DEADLINE_S = 300
"""For one answer of Docker: it unpacks a root file system in the longest of them."""

COMPILE_DEADLINE_S = 60
NEEDED_BYTES = 1 << 30
"""The file system twice (unpacked and as an archive) and what Docker makes of it."""

KEPT_S = 7 * 24 * 3600
"""So long an image of another engine is left alone, which may just have no container."""

BUILDER = "fumehood-builder-"
"""How the names of containers begin that a build uses; then come a deadline and a random part."""

MANIFEST = "opt/fumehood/manifest.txt"
PATH = "/usr/local/bin:/usr/bin:/bin"
SETTINGS = (f"ENV PATH={PATH} LANG=C.UTF-8", "WORKDIR /workspace")


@dataclass(frozen=True, slots=True)
class Built:
    """What came of it: which image, and what had to be made for it."""

    image: Image
    made_base: bool
    made_guest: bool


def build_image(
    client: docker.APIClient, recipe: Recipe, on_step: OnStep, *, force: bool = False
) -> Built:
    """Build what is missing or out of date; everything with `force`.

    Raises:
        ImageTrouble: with the cure. What was there before is still there.
    """
    try:
        _sweep_builders(client)
        base = None if force else _find_base(client, recipe)
        ready = _ready(client, recipe) if base is not None else None
        if ready is not None:
            return Built(ready, made_base=False, made_guest=False)
        replaced = _replaced(client, recipe)
        made_base = base is None
        base = base or _make_base(client, recipe, on_step)
        identifier = _add_guest(client, recipe, base, on_step)
        image = next(i for i in list_images(client, recipe.name) if i.id == identifier)
        for old in replaced - {identifier, base}:
            _remove_unused(client, old)
        return Built(image, made_base=made_base, made_guest=True)
    except (DockerException, RequestException) as error:
        raise trouble_in("Docker refused", [str(error)]) from None
    except OSError as error:
        raise trouble_in("The image cannot be written", [str(error)]) from None


def _ready(client: docker.APIClient, recipe: Recipe) -> Image | None:
    same = [image for image in list_images(client, recipe.name) if image.recipe == recipe.digest]
    return newest_own(same)


def _find_base(client: docker.APIClient, recipe: Recipe) -> str | None:
    rows = client.images(name=_base_tag(recipe), filters={"label": f"{RECIPE}={recipe.digest}"})
    return str(rows[0]["Id"]) if rows else None


def _base_tag(recipe: Recipe) -> str:
    return f"{REPOSITORY}/base-{recipe.name}:{recipe.digest[:12]}"


def _replaced(client: docker.APIClient, recipe: Recipe) -> set[str]:
    """What can go once the new image is there: earlier builds of it, and old ones of others."""
    guest, now = guest_digest(), time.time()
    tops = {
        image.id
        for image in list_images(client, recipe.name)
        if (image.recipe, image.guest) == (recipe.digest, guest)
        or now - image.created.timestamp() > KEPT_S
    }
    bases = {
        str(row["Id"])
        for row in client.images(name=f"{REPOSITORY}/base-{recipe.name}")
        if row["Labels"][RECIPE] == recipe.digest or now - row["Created"] > KEPT_S
    }
    return tops | bases


def _make_base(client: docker.APIClient, recipe: Recipe, on_step: OnStep) -> str:
    with tempfile.TemporaryDirectory(prefix="fumehood-image-") as directory:
        _require_room(Path(directory))
        root = Path(directory) / "root.tar"
        if recipe.base:
            make_root_from_base(client, recipe, root, on_step)
        else:
            make_root(recipe, root, on_step)
        labels = {
            IMAGE: f"base-{recipe.name}",
            RECIPE: recipe.digest,
            BASE: recipe.base,
            PACKAGES: str(_count_packages(root)),
            PACKAGES_FROM: str(int(time.time())),
        }
        on_step("importing it into Docker")
        with root.open("rb") as file:
            answer = client.import_image(
                src=file,
                repository=_base_tag(recipe).partition(":")[0],
                tag=_base_tag(recipe).partition(":")[2],
                changes=[*SETTINGS, _label_line(labels)],
            )
    if '"error"' in str(answer):
        raise trouble_in("Docker did not import the root file system", [str(answer)])
    base = _find_base(client, recipe)
    if base is None:
        raise ImageTrouble("Docker lost the base that it has just taken.", "Build it again.")
    return base


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


def _add_guest(client: docker.APIClient, recipe: Recipe, base: str, on_step: OnStep) -> str:
    """Put the guest on top. The image's own Python compiles it, without network or rights."""
    on_step("adding the guest")
    compiled = [
        "/usr/bin/python3", "-I", "-S", "-m", "compileall", "-q",
        "--invalidation-mode", "unchecked-hash", "/opt/fumehood/fumehood",
    ]  # fmt: skip
    with _builder(client, base, compiled) as container:
        if not client.put_archive(container, "/", guest_archive(recipe.about)):
            raise ImageTrouble("Docker did not take the guest's files.", "Build it again.")
        client.start(container)
        status = client.wait(container, timeout=COMPILE_DEADLINE_S)["StatusCode"]
        if status != 0:
            said = client.logs(container, tail=5).decode("utf-8", "replace")
            raise trouble_in("The image's Python does not compile the guest", said.splitlines())
        guest = guest_digest()
        labels = {
            IMAGE: recipe.name,
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
    # Engines of two versions share a host: the one's build does not leave the other's nameless.
    client.tag(made, f"{REPOSITORY}/{recipe.name}", tag=guest[:12])
    return str(made)


@contextmanager
def _builder(client: docker.APIClient, image: str, command: list[str]) -> Iterator[str]:
    host = client.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit="512m",
        pids_limit=64,
    )
    made = client.create_container(
        image,
        command=command,
        host_config=host,
        name=f"{BUILDER}{int(time.time()) + DEADLINE_S}-{secrets.token_hex(4)}",
    )
    try:
        yield made["Id"]
    finally:
        client.remove_container(made["Id"], force=True)


def _sweep_builders(client: docker.APIClient) -> None:
    """Containers that a killed build left behind."""
    for row in client.containers(all=True, filters={"name": BUILDER}):
        deadline = re.fullmatch(rf"/{BUILDER}(\d+)-[0-9a-f]+", row["Names"][0])
        if deadline is not None and int(deadline[1]) < time.time():
            client.remove_container(row["Id"], force=True)


def _remove_unused(client: docker.APIClient, identifier: str) -> None:
    """Images that a container or another image needs stay."""
    try:
        for tag in client.inspect_image(identifier)["RepoTags"] or ():
            client.remove_image(tag)
        client.remove_image(identifier)
    except APIError:
        return


def _label_line(labels: Mapping[str, str]) -> str:
    return "LABEL " + " ".join(f'"{key}"="{value}"' for key, value in labels.items())
