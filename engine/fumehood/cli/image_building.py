"""Building images from the command line: what is done now, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.cli.escaping import visible
from fumehood.cli.exits import ExitCode, fail

if TYPE_CHECKING:
    import docker

    from fumehood.sandbox.images.build import Built
    from fumehood.sandbox.images.recipe import Recipe


def open_engine() -> docker.APIClient:
    """A Docker engine that answers; else the end, with the cure."""
    from fumehood.sandbox.container.reach import DockerUnreachable, open_docker
    from fumehood.sandbox.images.build import DEADLINE_S

    try:
        return open_docker(timeout_s=DEADLINE_S)
    except DockerUnreachable as error:
        fail(error.message, ExitCode.UNAVAILABLE)


def build(
    client: docker.APIClient, recipe: Recipe, own: Path, *, force: bool, since: float
) -> Built:
    """Build one image and say how long it took; the end where it is not built."""
    from fumehood.sandbox.images.build import build_image
    from fumehood.sandbox.images.errors import ImageTrouble

    started = time.monotonic()
    try:
        with progress(recipe.name) as on_step:
            built = build_image(client, recipe, on_step, force=force, since=since, own=own)
    except ImageTrouble as trouble:
        fail(f"The image {recipe.name} was not built. {trouble}", ExitCode.UNAVAILABLE)
    what = "built" if built.made_guest else "is up to date"
    took = f" in {time.monotonic() - started:.1f} s" if built.made_guest else ""
    print(f"{recipe.name}: {what}{took}, {built.image.id}", file=sys.stderr)
    return built


@contextmanager
def progress(name: str) -> Iterator[Callable[[str], None]]:
    """What is done now, with the time: one moving line on a terminal, else a line a step."""
    started = time.monotonic()
    if not sys.stderr.isatty():

        def say(step: str) -> None:
            print(f"{name}: {time.monotonic() - started:5.1f} s  {visible(step)}", file=sys.stderr)
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
            done.append(f"{name}: {visible(step)}")
            progress.update(task, description=done[-1])

        yield move
