"""How `fumehood approvals` prints: JSON, tables, single lines, and recent authority changes.

The text of one approval is made in `approval_view.py`. Everything untrusted is escaped.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from fumehood.approvals.model import Approval, ApprovalState

SHOWN_CHANGES = 5
CHANGES_SINCE = timedelta(days=1)
STYLES = {
    "head": "bold", "theirs": "", "plain": "", "added": "green", "removed": "red",
    "warning": "bold yellow", "chosen": "reverse", "quiet": "dim",
}  # fmt: skip
"""The kind of a line → its style."""


def terminal_width() -> int:
    """Return the width to wrap to."""
    return shutil.get_terminal_size().columns


def show_json(value: Any) -> None:
    """Print ASCII JSON: untrusted characters could change the direction of a terminal's text."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def show_one(approval: Approval, *, as_json: bool) -> None:
    """Print one approval in full."""
    from fumehood.cli.approval_view import approval_lines
    from fumehood.cli.show import wants_json

    if wants_json(as_json):
        show_json(approval.model_dump(mode="json"))
    else:
        lines = approval_lines(approval, datetime.now(UTC), terminal_width())
        print_lines(lines, to_stderr=False)


def show_decided(decided: Sequence[Approval], *, as_json: bool) -> None:
    """Print approvals after a decision, one on a line."""
    from fumehood.cli.show import wants_json

    if wants_json(as_json):
        documents = [approval.model_dump(mode="json") for approval in decided]
        show_json(documents if len(documents) > 1 else documents[0])
        return
    for approval in decided:
        show_line(approval, as_json=False)


def show_list(found: Sequence[Approval]) -> None:
    """Print approvals as a table."""
    from fumehood.cli.approval_view import ago, one_line
    from fumehood.cli.escaping import json_line, visible
    from fumehood.cli.tables import Field, show_table

    now = datetime.now(UTC)
    fields = (
        Field("approval", whole=True), Field("state"), Field("tool"), Field("asked by", drop=1),
        Field("expires", drop=2), Field("arguments", drop=3),
    )  # fmt: skip
    rows = [
        (
            approval.id,
            approval.state.value,
            visible(f"{approval.tool}@{approval.tool_version}"),
            visible(approval.agent_id or approval.principal_id),
            ago(approval.expires_at, now) if approval.state is ApprovalState.PENDING else "",
            one_line(json_line(approval.arguments), 120),
        )
        for approval in found
    ]
    show_table(fields, rows)


def show_line(approval: Approval, *, as_json: bool) -> None:
    """Print one approval on one line and flush, since a reader may be waiting."""
    from fumehood.cli.approval_view import one_line, preview_in_words
    from fumehood.cli.escaping import json_line, visible

    if as_json:
        line = json.dumps(approval.model_dump(mode="json"))
    else:
        bell = "\a" if approval.state is ApprovalState.PENDING else ""
        who = visible(approval.agent_id or approval.principal_id)
        tool = visible(f"{approval.tool}@{approval.tool_version}")
        change = ""
        if approval.preview is not None and approval.state is ApprovalState.PENDING:
            change = f"{preview_in_words(approval.preview)}  ".lstrip()
        shown = one_line(json_line(approval.arguments), 60)
        what = f"{visible(approval.id)}  {approval.state.value:<11}"
        line = f"{bell}{what}  {tool}  {who}  {change}{shown}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show_changes(changes: Sequence[Any]) -> None:
    """Show recent authority changes, so that an approver notices misuse of a credential."""
    from fumehood.cli.approval_view import one_line
    from fumehood.cli.escaping import visible

    since = datetime.now(UTC) - CHANGES_SINCE
    fresh = [change for change in changes if change.at >= since][:SHOWN_CHANGES]
    if fresh:
        print("Authority changes in the last 24 h (all: GET /v1/changes):", file=sys.stderr)
    for change in fresh:
        text = f"{visible(change.principal_id)} {one_line(change.in_words, 100)}"
        print(f"  {change.at:%H:%M} {text}", file=sys.stderr)


def print_lines(lines: Sequence[Any], *, to_stderr: bool) -> None:
    """Print the lines' text literally, without interpreting markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(Text(line.text, style=STYLES[line.kind]), soft_wrap=True)
