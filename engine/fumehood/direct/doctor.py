"""The check of direct sandboxes in `fumehood doctor`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from fumehood.cli.findings import Finding, Verdict
from fumehood.config import Config
from fumehood.core.limits import Grade
from fumehood.direct.ask import launcher_directory, sandboxes_of
from fumehood.direct.cgroups import Groups, missing_controllers
from fumehood.direct.host import why_unfit
from fumehood.direct.store import open_store
from fumehood.image_store.find import find_image
from fumehood.parts import container_part
from fumehood.sandbox.container.container import GradeTooLow
from fumehood.sandbox.container.runtime import RuntimeFault
from fumehood.sandbox.wall import ImageMissing

NAME = "direct"


def check(config: Config) -> Iterator[Finding]:
    """Check whether this host can run programs without Docker. If the configuration does not choose
    this, a missing requirement is not reported as a warning.
    """
    part = container_part(config.container.engine)
    is_used = part is not None and part.name == NAME
    unfit = why_unfit(config.container.runtime if is_used else None)
    if unfit is not None:
        words = "No program can run." if is_used else "Use the engine docker on this host."
        verdict: Verdict = "warning" if is_used else "ok"
        yield Finding(NAME, verdict, f"{unfit.message} {words}", unfit.remedy)
        return
    missing = ", ".join(missing_controllers())
    words = f"user namespaces, cgroups v{Groups('').version}"
    if missing:
        words = f"user namespaces, but no control groups ({missing}): the grade is {Grade.WATCHED}"
    if not is_used:
        yield Finding(NAME, "ok", f"{words}; to run programs without Docker, set container.engine")
        return
    if missing and not Grade.WATCHED.is_at_least(config.container.least_grade):
        remedy = GradeTooLow(Grade.WATCHED, config.container.least_grade).remedy
        yield Finding(NAME, "warning", f"{words}, which container.least_grade refuses", remedy)
        return
    directory = launcher_directory()
    try:
        count = sum(one["is_running"] for one in sandboxes_of(directory))
    except OSError as error:
        words = f"The launcher in {directory} cannot be reached: {error}"
        yield Finding(NAME, "warning", words, "If it hangs, end it. Its sandboxes continue.")
    else:
        words = f"{words}; {count} running sandboxes, held by the launcher in {directory}"
        yield Finding(NAME, "ok", words)
    yield from image_findings(NAME, config)


def image_findings(prefix: str, config: Config) -> Iterator[Finding]:
    """Check the images that the configuration names. The findings' names begin with `prefix`."""
    images = {name for _, name in config.container.images} | {config.sessions.image}
    for name in sorted(images):
        yield _image_finding(f"{prefix}: image {name}", name, config)


def _image_finding(check: str, name: str, config: Config) -> Finding:
    store, build = open_store(), f"fumehood images build {name}"
    try:
        image = find_image(store, name, own=config.own_images)
        store.directories_of(image.id)
    except ImageMissing as missing:
        remedy = f"Build it: {build}"
        if shutil.which("mmdebstrap") is None:
            remedy = (
                f"apt-get install mmdebstrap, then {build}. Without it: fumehood images build host"
            )
        return Finding(check, "warning", missing.message, remedy)
    except RuntimeFault as fault:  # a layer is missing, or was changed
        return Finding(check, "warning", str(fault), f"Build it again: {build} --force")
    return Finding(check, "ok", f"{image.id[:19]}, {image.packages} packages")
