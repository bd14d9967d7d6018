"""The check of programs without namespaces in `fumehood doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.cli.findings import Finding, Verdict
from fumehood.config import Config
from fumehood.core.limits import Grade
from fumehood.landlock.host import NAME, why_unfit
from fumehood.landlock.runtime import image_of_host
from fumehood.parts import container_part
from fumehood.sandbox.container.container import GradeTooLow
from fumehood.sandbox.wall import ImageMissing


def check(config: Config) -> Iterator[Finding]:
    """Check whether this host can run programs without namespaces. If the configuration does not
    choose this, a missing requirement is not reported as a warning.
    """
    part = container_part(config.container.engine)
    is_used = part is not None and part.name == NAME
    unfit = why_unfit(config.container.runtime if is_used else None)
    if unfit is not None:
        words = "No program can run." if is_used else "It is not used."
        verdict: Verdict = "warning" if is_used else "ok"
        yield Finding(NAME, verdict, f"{unfit.message} {words}", unfit.remedy)
        return
    words = f"Landlock and seccomp; the grade is {Grade.PROCESS}"
    if not is_used:
        yield Finding(NAME, "ok", f'{words}; to use it, set container.engine to "{NAME}"')
        return
    if not Grade.PROCESS.is_at_least(config.container.least_grade):
        remedy = GradeTooLow(Grade.PROCESS, config.container.least_grade).remedy
        yield Finding(NAME, "warning", f"{words}, which container.least_grade refuses", remedy)
        return
    yield Finding(NAME, "ok", words)
    for name in sorted({name for _, name in config.container.images} | {config.sessions.image}):
        try:
            image = image_of_host(name)
        except ImageMissing as missing:
            remedy = "Set container.images and sessions.image to host."
            yield Finding(f"{NAME}: image {name}", "warning", missing.message, remedy)
        else:
            yield Finding(f"{NAME}: image {name}", "ok", f"{image.id[:19]}, this host's programs")
