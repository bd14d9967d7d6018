"""`fumehood approvals`: list and show calls that wait for approval, and decide on them.

Decisions need an approver's credential, which the approver types on the terminal. A decision names
the version of the approval that was shown. If the approval has changed since then, nothing is
decided.

The text of an approval comes from a model or its prompt, so it is untrusted. Invariants:

- Every argument is shown completely.
- Every line of untrusted text, even after folding, starts with a mark that the text cannot imitate.
  On a line that also contains trusted text, the trusted text comes first, so that a file's name,
  for example, cannot pass for its size.
- Control, invisible and direction-changing characters are escaped, and named in a warning.
- A preview of unknown form is shown completely, as JSON.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
)
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    Limit,
    deadline,
    newest,
    one_line,
    pages,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import APPROVE, calling, controlling
from fumehood.cli.show import Column, as_document, as_table, show_json, wants_json
from fumehood.client import ControlClient
from fumehood.client.wording import (
    OUTSIDE,
    SIGNS,
    ago,
    argument_name,
    context_in,
    effect_heading,
    entries_of,
    entry_facts,
    hidden_in,
    is_outside,
    is_shown,
    network_in_words,
    place_in_words,
    preview_in_words,
    rest_of,
    sends_heading,
)
from fumehood.core.escaping import aligned, json_line, json_lines, visible
from fumehood.core.json_types import JsonObject
from fumehood.core.pages import MAX_ITEMS

approvals = typer.Typer(help="Calls that wait for approval.", no_args_is_help=True)

SHOWN_CHANGES = 5
CHANGES_SINCE = timedelta(days=1)
STYLES = {
    "head": "bold", "theirs": "", "plain": "", "added": "green", "removed": "red",
    "warning": "bold yellow",
}  # fmt: skip
"""Maps the kind of a line to the style in which the line is printed."""

VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
PAGE = 100
OPEN = (ApprovalState.PENDING, ApprovalState.APPROVED, ApprovalState.STARTED)
"""The states of approvals that have not ended."""

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
    """Parse words of the form `ID[@VERSION]`, which name approvals. Return a dictionary from each
    id to the version that the user has seen, or to None if the user gave none.

    `version` is the value of the option `--version`. It is used for a word without a version.
    """
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
    """Show the approvals and request confirmation, unless `yes` is True. Then decide on the
    approvals.

    The decision applies only to the approvals' versions in `looked_at`. If an approval's version in
    `looked_at` is None, the decision applies to the version that was fetched and shown.
    """
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
    """End the command if an approval in `seen` is no longer pending, or has another version than
    the user has seen. The engine would refuse a decision on such an approval.

    `looked_at` maps the id of each approval, in the order of `seen`, to the version that the user
    has seen. None accepts any version.
    """
    for version, approval in zip(looked_at.values(), seen, strict=True):
        found = f"was already {approval.state}"
        if approval.state is ApprovalState.PENDING:
            if version in (None, approval.version):
                continue
            found = f"is now version {approval.version}, not {version}"
        fail(f"{approval.id} {found}. Nothing was decided.", ExitCode.TOOL_FAILED)


def _ask(client: ControlClient, seen: Sequence[Approval], decision: NewDecision) -> NewDecision:
    """Show the approvals in `seen` on standard error, and end the command unless the user types
    `yes`.

    Return the decision. A decision with edited arguments gets the digest of the action that was
    shown, so that it applies only to that action.
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
    """Yield the approvals whose calls wait or run, oldest first. Then, for ever, yield each
    approval that is new or has changed.

    Of the approvals whose calls have ended, only two kinds are looked at: the newest `PAGE`
    approvals, and those whose calls had not ended at the previous look.
    """
    changes = client.approvals.next_change(-1)
    seen: dict[str, Approval] | None = None
    while True:
        found = {one.id: one for one in client.approvals.list(limit=PAGE).items}
        for state in OPEN:
            for page in pages(partial(client.approvals.list, state=state, limit=PAGE)):
                found |= {one.id: one for one in page.items}
        known = seen or {}
        open_before = {one.id for one in known.values() if one.state in OPEN}
        found |= {missed: client.approvals.show(missed) for missed in open_before - found.keys()}
        for one in sorted(found.values(), key=lambda one: one.created_at):
            is_listed = seen is not None or one.state in OPEN
            if is_listed and (one.id not in known or known[one.id].version != one.version):
                yield one
        seen = found
        changes = client.approvals.next_change(changes)


def _seeing(
    mine: bool, socket: Path | None, credential_stdin: bool, *, as_json: bool
) -> AbstractContextManager[Any]:
    """Return a context with a client. If `mine` is True, this is the caller's client, which sees
    only the caller's own approvals. Otherwise, it is an approver's client, which sees the approvals
    of all principals.

    If `as_json` is True, a refusal by the engine is printed as JSON.
    """
    if mine:
        return calling(socket, as_json=as_json)
    return _approving(socket, credential_stdin, as_json=as_json)


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
        as_document(decided if len(decided) > 1 else decided[0])
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
    """Print one approval on one line. Flush the output, because another program may be waiting for
    it.
    """
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
    """Show recent changes to authority, so that an approver can notice misuse of a credential."""
    since = datetime.now(UTC) - CHANGES_SINCE
    fresh = [change for change in changes if change.at >= since][:SHOWN_CHANGES]
    if fresh:
        print("Authority changes in the last 24 h (all: GET /v1/changes):", file=sys.stderr)
    for change in fresh:
        text = f"{visible(change.principal_id)} {one_line(change.in_words, 100)}"
        print(f"  {change.at:%H:%M} {text}", file=sys.stderr)


def _print_lines(lines: Sequence[Any], *, to_stderr: bool) -> None:
    """Print the lines' text literally. Markup in the text is not interpreted."""
    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(Text(line.text, style=STYLES[line.kind]), soft_wrap=True)


# -- the display of an approval -------------------------------------------------------------


Kind = Literal["head", "plain", "theirs", "added", "removed", "warning"]

INDENT = "  "
MARK = "  │ "

BESIDE_FILES = ("printed", "variables", "requests")
"""Keys in the preview of a trial for effects other than changed files."""


def approval_lines(approval: Approval, now: datetime, columns: int) -> list[Line]:
    """Return the lines that show an approval: facts, arguments, effect, decisions and warnings.

    Lines longer than `columns` are folded.
    """
    facts = [
        Line(f"{visible(approval.id)}  {approval.state}", "head"),
        *(_field(name, value, columns) for name, value in _facts(approval, now)),
        Line(""),
    ]
    lines = [Line("arguments", "head"), *_arguments(approval.arguments, columns)]
    if is_outside(approval):
        lines = [*warning(f"{OUTSIDE}.", columns), Line(""), *lines]
    if words := approval.outlived_in_words:
        said = f"{words}, so this call can no longer run."
        lines += [Line(""), *warning(said, columns)]
    if approval.asked_arguments is not None:
        asked = _arguments(approval.asked_arguments, columns)
        lines += [Line(""), Line("as requested, before an edit", "head"), *asked]
    if approval.sends is not None:
        head = Line(sends_heading(approval).lower(), "head")
        lines += [Line(""), head, *_arguments(approval.sends, columns)]
    if (context := context_in(approval.preview)) is not None:
        lines += [Line(""), Line("context", "head"), *_arguments(context, columns)]
    elif approval.preview is not None:
        lines += [
            Line(""),
            Line(effect_heading(approval).lower(), "head"),
            *preview_lines(approval.preview, columns),
        ]
    if approval.decisions:
        lines += [Line(""), Line("decisions", "head"), *_decisions(approval, columns)]
    if hidden := hidden_in(approval):
        said = f"Escaped, because invisible or misleading: {hidden}"
        lines += [Line(""), *warning(said, columns)]
    return facts + lines


def rule_lines(rule: RememberedRule, columns: int) -> list[Line]:
    """Return the lines that show a remembered rule, which allows matching calls without approval.
    The rule is either saved or only proposed.
    """
    who = rule.principal_id + (f" as agent {rule.agent_id}" if rule.agent_id else "")
    until = f"until {rule.expires_at:%Y-%m-%d %H:%M} UTC" if rule.expires_at else "while it lasts"
    uses = "any number of times" if rule.uses_left is None else f"{rule.uses_left} more times"
    where = f"in session {rule.session_id}" if rule.session_id else "in any session"
    lines = [
        _field("allows", f"{rule.tool}, {uses}", columns),
        _field("to", who, columns),
        _field("scope", f"{where}, {until}", columns),
    ]
    if not rule.arguments:
        words = (
            Line("WITH ANY ARGUMENTS", "warning") if rule.any_others else Line("without arguments")
        )
        return [*lines, words]
    head = "if these arguments are equal" + ("" if rule.any_others else " and there are no others")
    lines += [Line(head, "head"), *_arguments(rule.arguments, columns)]
    return [*lines, Line("AND ANY OTHERS", "warning")] if rule.any_others else lines


def _facts(approval: Approval, now: datetime) -> Iterator[tuple[str, str]]:
    yield (
        "tool",
        f"{approval.tool}@{approval.tool_version}"
        + ("  (dangerous)" if approval.dangerous else ""),
    )
    yield "asked by", approval.principal_id
    if approval.agent_id is not None:
        yield "as agent", approval.agent_id
    if approval.session_id is not None:
        yield "in session", approval.session_id
    yield from _place(approval)
    yield "because", approval.rule + (f": {approval.reason}" if approval.reason else "")
    if approval.quorum > 1 or approval.approvers:
        who = f" from {', '.join(approval.approvers)}" if approval.approvers else ""
        yield "needs", f"{approval.quorum} approvals{who} ({len(approval.counted)} so far)"
    if approval.stuck is not None:
        yield "stuck", approval.stuck
    yield "made", f"{approval.created_at:%Y-%m-%d %H:%M:%S} UTC"
    if approval.state is ApprovalState.PENDING:
        yield "expires", f"{approval.expires_at:%H:%M:%S} UTC ({ago(approval.expires_at, now)})"
        if (at := approval.previewed_at) is not None:
            yield "previewed", f"{at:%H:%M:%S} UTC ({ago(at, now)})"
    if approval.code is not None:
        yield "ended", approval.code
    if approval.changed and approval.outlived is None:
        yield "changed", ", ".join(approval.changed)
    yield "version", str(approval.version)
    yield "call", approval.call_id


def _place(approval: Approval) -> Iterator[tuple[str, str]]:
    if place := place_in_words(approval):
        yield "runs", place
    if network := network_in_words(approval):
        yield "network", network
    if names := (approval.binding or {}).get("session_env"):
        yield "with variables", ", ".join(names)


def _field(name: str, value: str, columns: int) -> Line:
    return Line("\n".join(folded(f"{name + ':':<13}{visible(value)}", columns, indent=" " * 13)))


def _arguments(arguments: JsonObject, columns: int) -> Iterator[Line]:
    if not arguments:
        yield Line(f"{INDENT}none")
    for name, value in arguments.items():
        yield from _value(argument_name(name), value, columns)


def _value(name: str, value: Any, columns: int) -> Iterator[Line]:
    """Yield the lines that show a value. Multi-line texts and request bodies are shown as text, and
    all other values as JSON.
    """
    if isinstance(value, str) and ("\n" in value or name == "body"):
        yield from ours(f"{INDENT}{name} ({len(value)} characters)", columns)
        yield from theirs(value, columns)
        return
    shown = json_line(value)
    if isinstance(value, dict | list) and len(shown) > columns - len(name) - 2:
        yield from ours(INDENT + name, columns)
        yield from theirs(json_lines(value), columns)
        return
    yield from ours(f"{INDENT}{name}: {shown}", columns)


def _decisions(approval: Approval, columns: int) -> Iterator[Line]:
    for one in approval.decisions:
        marks = [one.decision, one.channel]
        marks += ["edited"] if one.edited else []
        marks += ["SELF-APPROVAL"] if one.is_self_approval else []
        if one.action_digest != approval.action_digest:
            marks.append("before an edit")
        said = f": {one.reason}" if one.reason else ""
        text = f"{one.at:%H:%M:%S} {one.approver} ({', '.join(marks)}){said}"
        yield from ours(INDENT + visible(text), columns)


def _rest(preview: JsonObject, columns: int) -> Iterator[Line]:
    rest = {key: value for key, value in preview.items() if not is_shown(key, value)}
    for name in BESIDE_FILES:
        if name in rest:
            yield from _value(name, rest.pop(name), columns)
    if rest:
        yield from _value("in all", rest, columns)


def preview_lines(preview: JsonObject, columns: int) -> Iterator[Line]:
    """Yield the lines that show the whole preview that the engine has computed."""
    if "would_fail" in preview:
        said = visible(str(preview["would_fail"]))
        yield from warning(f"The call would fail: {said}", columns)
    if is_shown("directory", directory := preview.get("directory")):
        yield from ours(f"{INDENT}in {visible(str(directory))}", columns, "head")
    if words := preview_in_words(preview):
        yield from ours(INDENT + words, columns, "head")
    for entry in entries_of(preview, "executed"):
        said = f"executable by your tools ({entry.get('by')}): {entry['path']}"
        yield from warning(f"{INDENT}! {visible(said)}", columns)
    for what, sign in SIGNS.items():
        for entry in entries_of(preview, what):
            yield from _entry(sign, entry, columns)
    for entry in entries_of(preview, "missing"):
        yield from ours(f"{INDENT}? missing: {visible(str(entry['path']))}", columns)
    for entry in entries_of(preview, "kept"):
        words = f"{INDENT}! kept, {visible(str(entry.get('why')))}: {visible(str(entry['path']))}"
        yield from warning(words, columns)
    yield from _rest(preview, columns)
    if preview.get("truncated"):
        yield Line("The list is incomplete.", "warning")


def _entry(sign: str, entry: JsonObject, columns: int) -> Iterator[Line]:
    kinds: dict[str, Kind] = {"+": "added", "-": "removed"}
    facts = ", ".join(entry_facts(entry)) or "entry"
    said = f"{facts}: {visible(str(entry['path']))}"
    yield from ours(f"{INDENT}{sign} {said}", columns, kinds.get(sign, "plain"))
    if "target" in entry:
        yield from ours(f"{INDENT * 3}leads to: {visible(str(entry['target']))}", columns)
    if rest := rest_of(entry):
        yield from ours(f"{INDENT * 3}also: {json_line(rest)}", columns)
    if isinstance(diff := entry.get("diff"), str):
        for line in diff.removesuffix("\n").split("\n"):
            yield from theirs(aligned(line), columns, kinds.get(line[:1], "theirs"))
    if entry.get("diff_coarse"):
        words = "Too large to compare line by line: removed and added as a whole."
        yield from warning(f"{INDENT * 3}{words}", columns)
    if entry.get("diff_truncated"):
        yield from warning(f"{INDENT * 3}There is more of this diff than is shown.", columns)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text that is safe to print. The line's `kind` determines its colour."""

    text: str
    kind: Kind = "plain"


def ours(text: str, columns: int, kind: Kind = "plain") -> Iterator[Line]:
    """Yield the lines of trusted text, folded to `columns`. `kind` determines their colour.
    Untrusted text within `text` must already be escaped.
    """
    return (Line(piece, kind) for piece in folded(text, columns, indent=MARK))


def warning(text: str, columns: int) -> Iterator[Line]:
    """Yield the lines of a warning. Untrusted text within `text` must already be escaped."""
    return ours(text, columns, "warning")


def theirs(text: str, columns: int, kind: Kind = "theirs") -> Iterator[Line]:
    """Yield the lines of untrusted text, folded to `columns`. Each line is escaped and begins with
    `MARK`, a bar at the left by which users recognise untrusted text. `kind` determines the colour.
    """
    for line in text.split("\n"):
        for piece in folded(visible(line), columns - len(MARK)):
            yield Line(MARK + piece, kind)


def folded(text: str, columns: int, indent: str = "") -> Iterable[str]:
    """Fold text into pieces of at most `columns`. Each piece after the first begins with
    `indent`.
    """
    if len(text) <= columns and cell_len(text) <= columns:
        return [text]
    first = chop_cells(text, columns)[0]
    others = chop_cells(text.removeprefix(first), max(1, columns - cell_len(indent)))
    return [first, *(indent + piece for piece in others)]
