"""The check of gVisor without Docker in `fumehood doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.cli.findings import Finding, Verdict
from fumehood.config import Config
from fumehood.core.limits import Grade
from fumehood.direct.cgroups import missing_controllers
from fumehood.direct.doctor import image_findings
from fumehood.gvisor import host
from fumehood.parts import container_part
from fumehood.sandbox.container.container import GradeTooLow

NAME = "gvisor"


def check(config: Config) -> Iterator[Finding]:
    """Check whether this host can run programs in gVisor without Docker. If the configuration does
    not choose this, a missing requirement is not reported as a warning.
    """
    part = container_part(config.container.engine)
    is_used = part is not None and part.name == NAME
    unfit = host.why_unfit(config.container.runtime if is_used else None)
    if unfit is not None:
        words = "No program can run." if is_used else "It is not used."
        verdict: Verdict = "warning" if is_used else "ok"
        yield Finding(NAME, verdict, f"{unfit.message} {words}", unfit.remedy)
        return
    grade = Grade.WATCHED if missing_controllers() else Grade.KERNEL
    words = f"runsc {host.version()}; the grade is {grade}"
    if is_used and not grade.is_at_least(config.container.least_grade):
        remedy = GradeTooLow(grade, config.container.least_grade).remedy
        yield Finding(NAME, "warning", f"{words}, which container.least_grade refuses", remedy)
        return
    if not is_used:
        words = f'{words}; to use it, set container.engine to "{NAME}"'
    yield Finding(NAME, "ok", words)
    if is_used:
        yield from image_findings(NAME, config)
