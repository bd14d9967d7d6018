"""The recipe of an operator's own image: a folder that adds packages to a built-in image.

Host side; uses the Python index but not Docker. The folder is made under a temporary name, and
`publish` renames it once the image is built. Invariant: a folder with an image's name is complete,
and only its owner can write in it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fumehood.sandbox.images.index import resolve
from fumehood.sandbox.images.recipe import (
    ImageSettings,
    Recipe,
    WrongRecipe,
    WrongRequirements,
    image_names,
    is_debian_package,
    is_own_name,
    merged,
    parse_requirements,
    read_recipe,
)
from fumehood.sandbox.images.rootfs import OnStep


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """The image that an operator requests."""

    name: str
    requirements: str
    """The text of a requirements file."""
    debian_packages: tuple[str, ...] = ()
    below: str = "python-data"
    """The name of the built-in image that it extends."""


def check_request(request: ImageRequest, home: Path, *, replace: bool = False) -> None:
    """Check a request before anything is downloaded or created.

    Raises:
        WrongRecipe: a name or a requirement is invalid, or the image exists already.
    """
    if not is_own_name(request.name):
        ours = ", ".join(image_names())
        raise WrongRecipe(
            f"{request.name[:80]!r} cannot be the name of an image of your own: it is made of a-z, "
            f"0-9 and '-', begins with a letter, has 31 characters at most, and is none of {ours}."
        )
    if request.below not in image_names():
        raise WrongRecipe(f"--from takes one of {', '.join(image_names())}.")
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
    """Yield a temporary folder with the image's recipe. It is removed at the end unless published.

    `home` is the folder of the operator's images; `cache` is the directory of downloaded wheels.

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
    """Rename the folder to the image's name, replacing an earlier one. Return the new path."""
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
    """Merge the built-in image's requirements with the requested ones."""
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
