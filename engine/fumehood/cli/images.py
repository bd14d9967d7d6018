"""`fumehood images build|list`: the images that containers are made from. No daemon is asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.model.json_types import JsonObject

if TYPE_CHECKING:
    import docker

    from fumehood.sandbox.container.build import Built
    from fumehood.sandbox.container.images import Image
    from fumehood.sandbox.container.recipe import Recipe

images = typer.Typer(help="The images that containers are made from.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@images.command("build")
def build_images(
    name: Annotated[
        str | None, typer.Argument(help="which image; all of them where none is named")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="A Debian image as REF@sha256:DIGEST to start from, instead of an own root file "
            "system; it is fetched, and packages are installed over the network."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build all of it anew, with packages of today.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build what is missing or out of date. Without `--base` it needs root and mmdebstrap."""
    from fumehood.cli.show import show_json, wants_json

    recipes = _recipes(name, base or "")
    client = _docker()
    built = [_build(client, recipe, force=force) for recipe in recipes]
    if wants_json(as_json):
        show_json([_document(result.image) for result in built])


@images.command("list")
def list_images(as_json: AsJson = False) -> None:
    """List the images that there are, newest first."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    from fumehood.cli.show import show_json, wants_json
    from fumehood.sandbox.container.images import list_images as listed

    try:
        found = listed(_docker())
    except (DockerException, RequestException):
        fail("Docker did not say which images there are.", ExitCode.UNAVAILABLE)
    if wants_json(as_json):
        show_json([_document(image) for image in found])
    elif not found:
        print("There are no images. Build them: fumehood images build", file=sys.stderr)
    else:
        _show(found)


def _recipes(name: str | None, base: str) -> list[Recipe]:
    from fumehood.sandbox.container.recipe import (
        UnknownImage,
        WrongRecipe,
        image_names,
        read_recipe,
    )

    try:
        names = [name] if name is not None else image_names()
        return [read_recipe(each, base=base) for each in names]
    except (UnknownImage, WrongRecipe) as error:
        fail(str(error), ExitCode.USAGE)


def _docker() -> docker.APIClient:
    from fumehood.sandbox.container.build import DEADLINE_S
    from fumehood.sandbox.container.reach import DockerUnreachable, open_docker

    try:
        return open_docker(timeout_s=DEADLINE_S)
    except DockerUnreachable as error:
        fail(error.message, ExitCode.UNAVAILABLE)


def _build(client: docker.APIClient, recipe: Recipe, *, force: bool) -> Built:
    from fumehood.sandbox.container.build import build_image
    from fumehood.sandbox.container.trouble import ImageTrouble

    started = time.monotonic()
    try:
        with _progress(recipe.name) as on_step:
            built = build_image(client, recipe, on_step, force=force)
    except ImageTrouble as trouble:
        fail(f"The image {recipe.name} was not built. {trouble}", ExitCode.UNAVAILABLE)
    if built.made_base:
        what = "built"
    else:
        what = "its guest was renewed" if built.made_guest else "is up to date"
    took = f" in {time.monotonic() - started:.1f} s" if built.made_guest else ""
    print(f"{recipe.name}: {what}{took}, {built.image.id}", file=sys.stderr)
    return built


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str], None]]:
    """What is done now, with the time: one moving line on a terminal, else a line a step."""
    started = time.monotonic()
    if not sys.stderr.isatty():

        def say(step: str) -> None:
            print(f"{name}: {time.monotonic() - started:5.1f} s  {step}", file=sys.stderr)
            sys.stderr.flush()

        yield say
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{name}: looking what is there")
        done: list[str] = []

        def move(step: str) -> None:
            if done:
                console.print(Text(done[-1], style="dim"))
            done.append(f"{name}: {step}")
            progress.update(task, description=f"{name}: {step}")

        yield move


def _show(found: list[Image]) -> None:
    from fumehood.cli.tables import Field, show_table

    fields = (
        Field("image"), Field("size", drop=1), Field("age", drop=2), Field("packages", drop=3),
        Field("languages", drop=4),
        Field("state"), Field("digest", whole=True),
    )  # fmt: skip
    now = datetime.now(UTC)
    rows = [
        (
            image.name,
            f"{image.size_bytes / 1e6:.0f} MB",
            age_in_words(image.packages_from, now),
            str(image.packages),
            ", ".join(image.languages),
            "current" if image.is_own else "of another version",
            image.id.removeprefix("sha256:")[:16],
        )
        for image in found
    ]
    show_table(fields, rows)


def age_in_words(then: datetime, now: datetime) -> str:
    """How long ago, in its largest unit."""
    seconds = max(0, int((now - then).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


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
