"""`fumehood approvals`: list and show calls that wait for approval, and decide on them.

Deciding needs an approver's credential, which is typed on the terminal. A decision carries the
version that was shown; if the approval has changed since, nothing is decided.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
)
from fumehood.cli.approval_view import Line, ago, approval_lines, preview_in_words, rule_lines
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    Limit,
    deadline,
    newest,
    one_line,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import APPROVE, calling, controlling
from fumehood.cli.show import Column, as_table, show_json, wants_json
from fumehood.client import ControlClient
from fumehood.core.escaping import json_line, visible
from fumehood.core.pages import MAX_ITEMS

approvals = typer.Typer(help="Calls that wait for approval.", no_args_is_help=True)

SHOWN_CHANGES = 5
CHANGES_SINCE = timedelta(days=1)
STYLES = {
    "head": "bold", "theirs": "", "plain": "", "added": "green", "removed": "red",
    "warning": "bold yellow",
}  # fmt: skip
"""The kind of a line → its style."""

VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
PAGE = 100
ENDED = frozenset({"approved", "denied", "expired", "cancelled", "done", "failed", "interrupted"})

ApprovalId = Annotated[str, typer.Argument(help="The approval's id, apr_….")]
ApprovalIds = Annotated[
    list[str],
    typer.Argument(
        metavar="ID[@VERSION]...",
        help="Approval ids, apr_…; with @VERSION only if that is still the version.",
    ),
]
Mine = Annotated[
    bool, typer.Option("--mine", help="Approvals of your own calls, over the callers' socket.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not show or ask; for scripts.")]
Version = Annotated[
    int | None,
    typer.Option("--version", help="For one approval: same as ID@VERSION."),
]


@approvals.command("list")
def list_approvals(
    state: Annotated[str, typer.Option(help="pending, approved, denied, …, or any.")] = "pending",
    tool: Annotated[str | None, typer.Option(help="Only for this tool.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only for calls made for this agent.")] = None,
    limit: Limit = 50,
    mine: Mine = False,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """List calls that wait for approval, newest first; and authority changes in the last 24 h."""
    query = {"state": _state(state), "tool": tool, "agent": agent}
    with _seeing(mine, socket, credential_stdin, as_json=as_json) as client:
        found, has_more = newest(partial(client.approvals.list, **query), limit)
        changes = () if mine or wants_json(as_json) else client.changes()
    _show_list(found, as_json)
    if has_more and not wants_json(as_json):
        print(f"There are more: --limit takes up to {MAX_ITEMS}.", file=sys.stderr)
    _show_changes(changes)


@approvals.command("show")
def show_approval(
    approval_id: ApprovalId,
    mine: Mine = False,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Show one approval in full: every argument, and the changes it would make."""
    with _seeing(mine, socket, credential_stdin, as_json=as_json) as client:
        found = client.approvals.show(approval_id)
    if wants_json(as_json):
        show_json(found.model_dump(mode="json"))
    else:
        lines = approval_lines(found, datetime.now(UTC), shutil.get_terminal_size().columns)
        _print_lines(lines, to_stderr=False)


@approvals.command("approve")
def approve(
    approval_ids: ApprovalIds,
    edit: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE", help="Replace all arguments with this JSON object."),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Reason, for the record.")] = None,
    remember: Annotated[
        bool, typer.Option("--remember", help="Also allow matching calls in this session.")
    ] = False,
    remember_until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also allow matching calls for a duration (30m, 2h) or until a time.",
        ),
    ] = None,
    uses: Annotated[
        int | None, typer.Option(min=1, help="How often that rule may be used.")
    ] = None,
    same: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Match on this argument and any others; repeatable."),
    ] = None,
    any_arguments: Annotated[
        bool, typer.Option("--any-arguments", help="Match calls with any arguments.")
    ] = False,
    version: Version = None,
    yes: Yes = False,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Approve calls: each is shown, then you confirm. Several are approved all or none."""
    from fumehood.cli.call import read_arguments

    wish = _wish(remember, remember_until, uses, same, any_arguments=any_arguments)
    arguments = None if edit is None else read_arguments(edit)
    decision = NewDecision(decision="approve", reason=reason, arguments=arguments, remember=wish)
    looked_at = _looked_at(approval_ids, version)
    if len(looked_at) > 1 and edit is not None:
        fail("--edit takes one approval.", ExitCode.USAGE)
    _decide(
        looked_at, decision, yes=yes, as_json=as_json,
        credential_stdin=credential_stdin, socket=socket,
    )  # fmt: skip


@approvals.command("deny")
def deny(
    approval_ids: ApprovalIds,
    reason: Annotated[
        str | None,
        typer.Option(help="Reason. The model is told, so that it can try something else."),
    ] = None,
    version: Version = None,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Deny calls, without confirmation."""
    decision = NewDecision(decision="deny", reason=reason)
    _decide(
        _looked_at(approval_ids, version), decision, yes=True, as_json=as_json,
        credential_stdin=credential_stdin, socket=socket,
    )  # fmt: skip


@approvals.command("watch")
def watch(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Print one line for each new or changed approval, until Ctrl-C. A bell rings for new ones."""
    try:
        with _approving(socket, credential_stdin, as_json=as_json) as client:
            for approval in _followed(client):
                _show_line(approval, as_json=wants_json(as_json))
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.SUCCESS) from None


def _show_outcome(found: Approval, as_json: bool) -> None:
    _show_decided([found], as_json=as_json)


plain(
    approvals,
    "approvals.resolve",
    "Record the outcome of a call that was interrupted when the engine ended. Runs nothing.",
    _show_outcome,
    arguments={
        "approval_id": ApprovalId,
        "outcome": Annotated[
            Literal["done", "failed"], typer.Option(help="The outcome that you found.")
        ],
        "note": (
            Annotated[str | None, typer.Option(help="How you know, for the record.")], None
        ),
    },
    scope=APPROVE,
)  # fmt: skip
plain(
    approvals,
    "approvals.cancel",
    "Withdraw a call of your own that waits.",
    _show_outcome,
    arguments={"approval_id": ApprovalId},
    scope=None,
)


def _matching(rule: RememberedRule) -> str:
    others = " and any others" if rule.any_others else ""
    return one_line(json_line(rule.arguments), 200) + others


def _until(rule: RememberedRule) -> str:
    return f"{rule.expires_at:%Y-%m-%d %H:%M}" if rule.expires_at else "session's end"


@approvals.command("remembered")
def remembered(
    every: Annotated[
        bool, typer.Option("--all", help="Include removed, used-up and expired rules.")
    ] = False,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """List the rules remembered from approvers' decisions."""
    with _approving(socket, credential_stdin, as_json=as_json) as client:
        rules = [rule for rule in client.approvals.remembered() if every or _holds(rule)]
    _show_rules(rules, as_json)


_show_rules = as_table(
    Column("rule", lambda rule: rule.id, whole=True),
    Column("tool", lambda rule: visible(rule.tool)),
    Column("who", lambda rule: visible(rule.agent_id or rule.principal_id)),
    Column("matching", _matching),
    Column("until (UTC)", _until, drop=2),
    Column("uses left", lambda rule: "any" if rule.uses_left is None else str(rule.uses_left), 1),
    Column("by", lambda rule: rule.created_by, drop=3),
)
plain(
    approvals,
    "approvals.forget",
    "Remove a remembered rule: the calls it allowed need approval again.",
    arguments={
        "rule_id": Annotated[str, typer.Argument(help="The rule's id, as listed by `remembered`.")]
    },
    scope=APPROVE,
)


def _approving(
    socket: Path | None, credential_stdin: bool, *, as_json: bool = False
) -> AbstractContextManager[ControlClient]:
    return controlling(socket, credential_stdin=credential_stdin, as_json=as_json, scope=APPROVE)


def _holds(rule: RememberedRule) -> bool:
    is_over = rule.expires_at is not None and rule.expires_at <= datetime.now(UTC)
    return rule.removed_at is None and rule.uses_left != 0 and not is_over


def _looked_at(given: Sequence[str], version: int | None) -> dict[str, int | None]:
    """Map each approval's id to the version that its user has seen, or None if not given."""
    if version is not None and (len(given) > 1 or "@" in given[0]):
        fail("--version takes one approval. For several, use ID@VERSION.", ExitCode.USAGE)
    found: dict[str, int | None] = {}
    for text in given:
        approval_id, at, number = text.partition("@")
        if at and not VERSION.fullmatch(number):
            fail(f"{text[:80]!r}: after the @ comes a number, the version.", ExitCode.USAGE)
        found[approval_id] = int(number) if at else version
    return found


def _decide(
    looked_at: Mapping[str, int | None],
    decision: NewDecision,
    *,
    yes: bool,
    as_json: bool,
    credential_stdin: bool,
    socket: Path | None,
) -> None:
    """Show the approvals, ask for confirmation, and decide on exactly what was shown."""
    if not yes and (credential_stdin or not sys.stdin.isatty()):
        fail(
            "There is no terminal to confirm on. Look at it first, then add --yes.", ExitCode.USAGE
        )
    with _approving(socket, credential_stdin, as_json=as_json) as client:
        seen = [client.approvals.show(approval_id) for approval_id in looked_at]
        if not yes:
            _require_open(seen, looked_at)
            decision = _ask(client, seen, decision)
        items = [
            OneOfSeveral(
                approval_id=approval.id,
                version=looked_at[asked] or approval.version,
                decision=decision,
            )
            for asked, approval in zip(looked_at, seen, strict=True)
        ]
        decided = client.approvals.decide_all(items)
    _show_decided(decided, as_json=as_json)


def _require_open(seen: Sequence[Approval], looked_at: Mapping[str, int | None]) -> None:
    """End the command if the engine would refuse a decision, instead of asking for it."""
    for version, approval in zip(looked_at.values(), seen, strict=True):
        found = f"was already {approval.state}"
        if approval.state is ApprovalState.PENDING:
            if version in (None, approval.version):
                continue
            found = f"is now version {approval.version}, not {version}"
        fail(f"{approval.id} {found}. Nothing was decided.", ExitCode.TOOL_FAILED)


def _ask(client: ControlClient, seen: Sequence[Approval], decision: NewDecision) -> NewDecision:
    """Show everything on standard error. Continue only if the user types `yes`.

    The returned decision is bound to what was shown.
    """
    columns = shutil.get_terminal_size().columns
    for approval in seen:
        lines = approval_lines(approval, datetime.now(UTC), columns)
        if decision.arguments is not None:
            edited = client.approvals.preview_edit(approval.id, decision.arguments)
            decision = decision.model_copy(update={"action_digest": edited.action_digest})
            lines += [Line(""), Line("AS EDITED", "head")]
            lines += approval_lines(edited, datetime.now(UTC), columns)
        if decision.remember is not None:
            rule = client.approvals.preview_remember(approval.id, decision.remember)
            lines += [Line(""), Line("and remember this rule", "head"), *rule_lines(rule, columns)]
        _print_lines([*lines, Line("")], to_stderr=True)
    what = seen[0].id if len(seen) == 1 else f"all {len(seen)}"
    print(f"Approve {what}? Type yes: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() != "yes":
        fail("Nothing was decided.", ExitCode.TOOL_FAILED)
    return decision


def _followed(client: ControlClient) -> Iterator[Approval]:
    """Yield open approvals, oldest first, then every change."""
    changes = client.approvals.next_change(-1)
    versions: dict[str, int] | None = None
    while True:
        found = client.approvals.list(limit=PAGE).items
        for approval in reversed(found):
            if versions is None and approval.state in ENDED:
                continue
            if (versions or {}).get(approval.id) != approval.version:
                yield approval
        versions = {approval.id: approval.version for approval in found}
        changes = client.approvals.next_change(changes)


@contextmanager
def _seeing(
    mine: bool, socket: Path | None, credential_stdin: bool, *, as_json: bool
) -> Iterator[Any]:
    """Connect as the caller (`--mine`) or as an approver, who sees all approvals."""
    if mine:
        if credential_stdin:
            fail("--mine needs no credential.", ExitCode.USAGE)
        with calling(socket, as_json=as_json) as own:
            yield own
        return
    with _approving(socket, credential_stdin, as_json=as_json) as every:
        yield every


def _state(given: str) -> str | None:
    if given == "any":
        return None
    known = [state.value for state in ApprovalState]
    if given not in known:
        fail(f"--state takes {', '.join(known)}, or any.", ExitCode.USAGE)
    return given


def _wish(
    remember: bool,
    until: str | None,
    uses: int | None,
    same: list[str] | None,
    *,
    any_arguments: bool,
) -> RememberWish | None:
    if not remember and until is None:
        if uses is not None or same or any_arguments:
            fail("--uses, --same and --any-arguments go with --remember.", ExitCode.USAGE)
        return None
    if (remember and until is not None) or (same and any_arguments):
        words = "Choose --remember or --remember-until, and --same or --any-arguments."
        fail(words, ExitCode.USAGE)
    now = datetime.now(UTC)
    return RememberWish(
        scope="session" if until is None else "until",
        until=None if until is None else deadline(until, now, "--remember-until"),
        uses=uses,
        arguments=tuple(same or ()) if same or any_arguments else None,
    )


# -- output --------------------------------------------------------------------------------


def _show_decided(decided: Sequence[Approval], *, as_json: bool) -> None:
    if wants_json(as_json):
        documents = [approval.model_dump(mode="json") for approval in decided]
        show_json(documents if len(documents) > 1 else documents[0])
        return
    for approval in decided:
        _show_line(approval, as_json=False)


def _expiry(approval: Approval) -> str:
    is_open = approval.state is ApprovalState.PENDING
    return ago(approval.expires_at, datetime.now(UTC)) if is_open else ""


_show_list = as_table(
    Column("approval", lambda approval: approval.id, whole=True),
    Column("state", lambda approval: approval.state.value),
    Column("tool", lambda approval: visible(f"{approval.tool}@{approval.tool_version}")),
    Column("asked by", lambda one: visible(one.agent_id or one.principal_id), drop=1),
    Column("expires", _expiry, drop=2),
    Column("arguments", lambda approval: one_line(json_line(approval.arguments), 120), drop=3),
)


def _show_line(approval: Approval, *, as_json: bool) -> None:
    """Print one approval on one line and flush, since a reader may be waiting."""
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


def _show_changes(changes: Sequence[Any]) -> None:
    """Show recent authority changes, so that an approver notices misuse of a credential."""
    since = datetime.now(UTC) - CHANGES_SINCE
    fresh = [change for change in changes if change.at >= since][:SHOWN_CHANGES]
    if fresh:
        print("Authority changes in the last 24 h (all: GET /v1/changes):", file=sys.stderr)
    for change in fresh:
        text = f"{visible(change.principal_id)} {one_line(change.in_words, 100)}"
        print(f"  {change.at:%H:%M} {text}", file=sys.stderr)


def _print_lines(lines: Sequence[Any], *, to_stderr: bool) -> None:
    """Print the lines' text literally, without interpreting markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(Text(line.text, style=STYLES[line.kind]), soft_wrap=True)
