"""The commands `fumehood images build|list|load|new|remove|save`, for the images of containers.
They need no daemon.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import AsJson, age, read_text
from fumehood.cli.reach import read_config
from fumehood.cli.show import Column, show_json, show_table, wants_json
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.names import did_you_mean
from fumehood.image_store.faults import ImageBuildError, build_error
from fumehood.image_store.find import find_image, list_images
from fumehood.image_store.store import ImageStore, open_store
from fumehood.images.build import (
    Built,
    ImageRequest,
    build_image,
    check_request,
    is_own_name,
    make_aside,
    publish,
    wheel_cache,
)
from fumehood.images.removal import idle_roots, images_of, remove_unused, useless
from fumehood.protocol.strict_json import BYTE_ORDER_MARK
from fumehood.sandbox.container.runtime import RuntimeFault
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import (
    Recipe,
    UnknownImage,
    WrongRecipe,
    image_names,
    read_own_files,
    read_recipe,
    recipe_of,
)
from fumehood.sandbox.trusted_files import Untrusted
from fumehood.sandbox.wall import ImageMissing

if TYPE_CHECKING:
    from fumehood.config import Config

images = typer.Typer(help="The images that containers run.", no_args_is_help=True)

Base = Annotated[
    str | None,
    typer.Option(
        help="A Debian base image as REF@sha256:DIGEST, instead of building a root file "
        "system; it is pulled, and packages are installed over the network."
    ),
]


@images.command("build")
def build_images(
    name: Annotated[
        str | None, typer.Argument(help="Image to build; default: those in the configuration.")
    ] = None,
    base: Base = None,
    force: Annotated[
        bool, typer.Option("--force", help="Rebuild everything, with today's packages.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build missing or outdated images. Without `--base`, this needs mmdebstrap, and either root or
    the package uidmap.
    """
    started = time.time()
    config = read_config()
    own, of_languages = config.own_images, config.container.images.model_dump().values()
    used = dict.fromkeys([*of_languages, config.sessions.image])
    names = list(used) if name is None else [name]
    try:
        recipes = [read_recipe(each, base=base or "", own=own) for each in names]
    except (UnknownImage, WrongRecipe) as error:
        fail(str(error), ExitCode.USAGE)
    store = _open_store(config)
    built = [_build(store, recipe, own, force=force, since=started) for recipe in recipes]
    made = sum(result.made_guest for result in built)
    if any(recipe.is_of_host for recipe in recipes):
        print(
            'Use it with [container.images] python = "host" and shell = "host", and [sessions] '
            'image = "host" in the configuration.',
            file=sys.stderr,
        )
    if len(built) > 1 and made:
        print(f"{made} images in {time.time() - started:.1f} s", file=sys.stderr)
    if wants_json(as_json):
        show_json([_document(result.image) for result in built])


@images.command("new")
def new_image(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    requirements: Annotated[
        Path | None,
        typer.Option(
            "--requirements",
            help="A requirements file of Python packages: names, extras, versions, markers.",
        ),
    ] = None,
    packages: Annotated[
        list[str] | None, typer.Option("--package", help="A Debian package; repeatable.")
    ] = None,
    below: Annotated[str, typer.Option("--from", help="The image to build on.")] = "python-data",
    base: Base = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing image of this name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make your own image from lists of packages: lock, download, build."""
    text = "" if requirements is None else read_text(str(requirements), str(requirements))
    text = text.removeprefix(BYTE_ORDER_MARK)
    request = ImageRequest(name, text, tuple(packages or ()), below)
    image = _make(request, base or "", replace=replace)
    print(
        f'Use it with `sessions new --image {name}`, or set [container.images] python = "{name}"'
        " in the configuration.",
        file=sys.stderr,
    )
    if wants_json(as_json):
        show_json(_document(image))


@images.command("save")
def save_image(
    name: Annotated[str, typer.Argument(help="Image to save.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Write an image to a file, for a host that cannot build images."""
    config = read_config()
    store = _open_store(config)
    _require_known(store, name, config.own_images)
    new = file.with_name(f".{file.name}.new")
    try:
        image = find_image(store, name, own=config.own_images)
        with new.open("wb") as opened:
            store.save(image.id, opened)
        new.replace(file)
    except ImageMissing as missing:
        fail(missing.message, ExitCode.UNAVAILABLE)
    except RuntimeFault as error:
        fail(f"{store.name} could not save the image. {error}", ExitCode.UNAVAILABLE)
    except OSError as error:
        fail(f"The file cannot be written: {error.strerror or error}", ExitCode.UNAVAILABLE)
    finally:
        new.unlink(missing_ok=True)
    print(f"{file}: {file.stat().st_size / 1e6:.0f} MB", file=sys.stderr)


@images.command("load")
def load_images(
    file: Annotated[Path, typer.Argument(help="File that `images save` has written.")],
) -> None:
    """Load an image from a file. Whoever has made the file decides what runs in containers."""
    config = read_config()
    store = _open_store(config)
    try:
        before = {image.id for image in list_images(store)}
        with file.open("rb") as opened:
            store.load(opened)
        new = [
            image for image in list_images(store, own=config.own_images) if image.id not in before
        ]
    except RuntimeFault as error:
        fail(f"{store.name} could not load the image. {error}", ExitCode.UNAVAILABLE)
    except OSError as error:
        fail(f"The file cannot be read: {error.strerror or error}", ExitCode.UNAVAILABLE)
    for image in new:
        fits = "" if image.is_own else ", which another version of the engine has built"
        print(f"{image.name}: loaded, {image.id}{fits}", file=sys.stderr)
    if not new:
        print("Nothing is new in it.", file=sys.stderr)


@images.command("remove")
def remove_images(
    name: Annotated[
        str | None, typer.Argument(help="Image to remove; default: old images.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove an image, and the folder of an own image.

    Without a name, remove images that this version of the engine does not use and that are older
    than a week. Images that containers use stay.
    """
    config = read_config()
    own = config.own_images
    store = _open_store(config)
    try:
        if name is not None:
            _require_known(store, name, own)
        tops = set() if name is None else {image.id for image in list_images(store, name)}
        named = images_of(store, name) if name is not None else useless(store, own)
        gone = remove_unused(store, named)
        gone |= remove_unused(store, idle_roots(store, own))
        users = sorted({user for image in tops - gone for user in store.users_of(image)})
    except RuntimeFault:
        fail(f"{store.name} could not remove the images.", ExitCode.UNAVAILABLE)
    if name is not None and not tops - gone and is_own_name(name) and (own / name).is_dir():
        shutil.rmtree(own / name)
    kept = named - gone
    if wants_json(as_json):
        show_json({"removed": sorted(gone), "kept": sorted(kept)})
    print(f"{len(gone)} removed, {len(kept)} in use", file=sys.stderr)
    if tops - gone:
        why = f"containers use it: {', '.join(users)}. Stop their engine, which removes them"
        fail(
            f"The image {name} stays, because {why if users else 'images are based on it'}.",
            ExitCode.TOOL_FAILED,
        )


@images.command("list")
def show_images(as_json: AsJson = False) -> None:
    """List existing images, newest first."""
    config = read_config()
    store = _open_store(config)
    try:
        found = list_images(store, own=config.own_images)
    except RuntimeFault:
        fail(f"{store.name} could not list the images.", ExitCode.UNAVAILABLE)
    if wants_json(as_json):
        show_json([_document(image) for image in found])
    elif not found:
        print("There are no images. Build them: fumehood images build", file=sys.stderr)
    else:
        _show(found)


def _make(request: ImageRequest, base: str, *, replace: bool) -> Image:
    """Build the image that an operator has requested, and return it. `base` is the Debian base
    image as `REF@sha256:DIGEST`, or empty if the build makes a root file system. If `replace` is
    True, an existing image with the same name is replaced.

    The recipe is created in a temporary folder, which gets its final name after the build. If a
    step fails, print the reason and end the command.
    """
    config = read_config()
    own = config.own_images
    try:
        check_request(request, own, replace=replace)
        store = _open_store(config)
        with ExitStack() as stack:
            made = make_aside(request, own, wheel_cache(), _step(request.name))
            folder = stack.enter_context(made)
            recipe = recipe_of(request.name, read_own_files(folder), base=base)
            built = _build(store, recipe, own, force=False, since=time.time())
            publish(folder, request.name)
    except (WrongRecipe, Untrusted) as error:
        fail(str(error), ExitCode.USAGE)
    except ImageBuildError as error:
        fail(f"The image {request.name} was not built. {error}", ExitCode.UNAVAILABLE)
    except OSError as error:
        why = build_error("Its files cannot be written", [str(error)])
        fail(f"The image {request.name} was not built. {why}", ExitCode.UNAVAILABLE)
    return built.image


def _require_known(store: ImageStore, name: str, own: Path) -> None:
    """End the command with an error if there is no image with this name.

    `own` is the folder with the operator's recipes. An image exists if there is a recipe with its
    name. An operator's image also exists if its folder is below `own`, or if the store has it.
    """
    names = image_names(own=own)
    if name in names:
        return
    if not is_own_name(name) or not ((own / name).is_dir() or images_of(store, name)):
        meant = did_you_mean(name, names)
        fail(f"There is no image {name[:80]!r}. Known: {', '.join(names)}.{meant}", ExitCode.USAGE)


def _show(found: list[Image]) -> None:
    fields = (
        Column("image"), Column("size", drop=2), Column("age", drop=3), Column("packages", drop=4),
        Column("languages", drop=1),
        Column("state"), Column("digest", whole=True),
    )  # fmt: skip
    now = datetime.now(UTC)
    rows = [
        (
            image.name,
            f"{image.size_bytes / 1e6:.0f} MB",
            age(image.packages_from, now),
            str(image.packages),
            ", ".join(image.languages),
            "current" if image.is_own else "of another version",
            image.id.removeprefix("sha256:")[:16],
        )
        for image in found
    ]
    show_table(fields, rows)


def _document(image: Image) -> JsonObject:
    return {
        "name": image.name,
        "digest": image.id,
        "size_bytes": image.size_bytes,
        "created": image.created.isoformat(),
        "packages_from": image.packages_from.isoformat(),
        "age_seconds": max(0, int((datetime.now(UTC) - image.packages_from).total_seconds())),
        "packages": image.packages,
        "languages": list(image.languages),
        "guest_mb": image.guest_mb,
        "base": image.base or None,
        "recipe": image.recipe,
        "guest": image.guest,
        "up_to_date": image.is_own,
    }


def _open_store(config: Config) -> ImageStore:
    """Return the store of the images. If it cannot be opened, print the remedy and end the
    command.
    """
    try:
        return open_store(config)
    except RuntimeFault as error:
        fail(f"{error.message} {error.remedy}", ExitCode.UNAVAILABLE)


def _build(store: ImageStore, recipe: Recipe, own: Path, *, force: bool, since: float) -> Built:
    """Build one image, print how long it took, and return the result. If the build fails, print the
    reason and end the command.
    """
    started = time.monotonic()
    try:
        on_step = _step(recipe.name)
        built = build_image(store, recipe, on_step, force=force, since=since, own=own)
    except ImageBuildError as error:
        fail(f"The image {recipe.name} was not built. {error}", ExitCode.UNAVAILABLE)
    what = "built" if built.made_guest else "is up to date"
    took = f" in {time.monotonic() - started:.1f} s" if built.made_guest else ""
    print(f"{recipe.name}: {what}{took}, {built.image.id}", file=sys.stderr)
    return built


def _step(name: str) -> Callable[[str], None]:
    """Return a function that prints a step of the build of the image `name`, with the seconds since
    `_step` was called.
    """
    started = time.monotonic()

    def show(step: str) -> None:
        took = f"{time.monotonic() - started:5.1f} s"
        print(f"{name}: {took}  {visible(step)}", file=sys.stderr, flush=True)

    return show
