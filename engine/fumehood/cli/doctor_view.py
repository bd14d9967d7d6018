"""How the findings of `fumehood doctor` look on a terminal: each in full, or what is well in a
line per group.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from fumehood.cli.escaping import printable
from fumehood.cli.finding import Finding, Verdict
from fumehood.cli.show import styled

GROUPS = {
    "Host": ("platform", "python", "asteval", "RestrictedPython"),
    "Engine": ("configuration", "state directory", "daemon"),
    "Authority": ("approvers", "policy", "webhook", "audit key"),
    "Limits": ("interpreter:", "jail:"),
    "Docker": ("docker", "docker:"),
    "Images": ("image:",),
    "Tools": ("tools", "tools directory"),
}
"""Title → checks, or what their names begin with."""

COLOURS: dict[Verdict, str] = {"ok": "32", "warning": "33", "missing": "31"}
"""*Source*: ECMA-48, SGR."""

VERDICT_COLUMNS = 9
INDENT = " " * (VERDICT_COLUMNS + 2)


def show_findings(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Every finding in full, or only those that need attention and a count of the others."""
    for finding in findings:
        if verbose or not _is_well(finding):
            _show(finding.verdict, f"{finding.check}: {finding.found}")
            if finding.cure:
                print(_wrapped(f"{INDENT}Remedy: {finding.cure}"))
    if not verbose:
        for line in _groups(findings):
            _show("ok", line)
        print("Every check in full: fumehood doctor --verbose")


def _is_well(finding: Finding) -> bool:
    """Whether it needs no attention. An image that may be missing has verdict ok and a cure."""
    return finding.verdict == "ok" and not finding.cure


def _groups(findings: Sequence[Finding]) -> Iterator[str]:
    for title, begins in GROUPS.items():
        members = [one for one in findings if _begin(one.check) in begins]
        well = [one.check.partition(": ")[2] or one.check for one in members if _is_well(one)]
        if well and title == "Limits":
            yield f"{title}: {len(well)} of {len(members)} enforced"
        elif well:
            yield f"{title}: {len(well)} of {len(members)} ok: {', '.join(well)}"


def _begin(check: str) -> str:
    head, colon, _ = check.partition(":")
    return head + colon


def _show(verdict: Verdict, text: str) -> None:
    shown = _wrapped(f"{verdict:<{VERDICT_COLUMNS}}{text}")
    print(styled(verdict, COLOURS[verdict]) + shown[len(verdict) :])


def _wrapped(text: str) -> str:
    """Lines that fit the terminal; a path that is longer than one stays whole, to be copied."""
    return textwrap.fill(
        printable(text), shutil.get_terminal_size().columns, subsequent_indent=INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
