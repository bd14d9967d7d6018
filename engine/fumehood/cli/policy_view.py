"""How the policy looks: what it decides of a call, and its rules."""

from __future__ import annotations

from fumehood.cli.escaping import say
from fumehood.cli.show import show_json, wants_json
from fumehood.cli.tables import Field, show_table
from fumehood.policy.model import Explanation, PolicyStatus

ANSWERS = {True: "yes", False: "no", None: "in doubt"}


def show_explanation(told: Explanation, *, as_json: bool) -> None:
    """The decision, then each rule that is about the call or nearly is."""
    if wants_json(as_json):
        show_json(told.model_dump(mode="json"))
        return
    say(f"{told.verdict}  {told.tool}  by {told.rule}")
    say(f"policy {told.policy_version}, environment {told.environment}")
    if told.reason is not None:
        say(f"reason: {told.reason}")
    if told.approvers or told.quorum > 1:
        who = ", ".join(told.approvers) or "any approver"
        say(f"{told.quorum} of: {who}")
    for line in told.shadow:
        say(f"in shadow mode: {line}")
    for rule in told.rules:
        marks = "matches" if rule.matches else "does not match"
        shadow = ", in shadow mode" if rule.mode == "shadow" else ""
        where = f" (line {rule.line})" if rule.line is not None else ""
        say(f"\n{rule.id}{where}: {rule.decision}{shadow}: {marks}")
        for part in rule.parts:
            compared = f" (it is {part.compared})" if part.compared is not None else ""
            say(f"  {ANSWERS[part.holds]:8}  {part.says}{compared}")


def show_status(status: PolicyStatus, *, as_json: bool) -> None:
    """The version and a table of the rules."""
    if wants_json(as_json):
        show_json(status.model_dump(mode="json"))
        return
    say(f"policy {status.version} ({status.file or 'no file: the defaults'})")
    say(f"environment {status.environment}")
    for fault in status.refused:
        say(f"the file is refused, older rules stay: {fault}")
    has_lines = any(rule.line is not None for rule in status.rules)  # TOML has none
    fields = (
        Field("rule"), Field("decision"), *([Field("line", drop=3)] if has_lines else []),
        Field("mode", drop=2),
        Field("here", drop=2), Field("would have", drop=1), Field("reason", drop=4),
    )  # fmt: skip
    rows = [
        (
            rule.id, str(rule.decision), *([str(rule.line or "")] if has_lines else []), rule.mode,
            "yes" if rule.is_of_this_environment else "no",
            str(rule.would_have_decided) if rule.mode == "shadow" else "", rule.reason or "",
        )
        for rule in status.rules
    ]  # fmt: skip
    if rows:
        show_table(fields, rows)
