"""The inbox: calls that wait for approval, decisions on these calls, and recently decided calls.

Every decision carries the approval's version and the action's digest from the page, so that the
decision applies to exactly what the page showed, or to nothing. The engine checks who may decide,
and this page shows the engine's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError
from starlette.responses import Response

from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
)
from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.client.wording import (
    context_in,
    network_in_words,
    place_in_words,
)
from fumehood.core.escaping import json_lines
from fumehood.core.json_types import JsonObject
from fumehood.core.pages import MAX_PAGE
from fumehood.protocol import strict_json
from fumehood.web.arguments import ArgumentField, arguments_of, as_sent, errors_of, fields_of
from fumehood.web.figures import limits_in_words, money
from fumehood.web.view import Form, Page, Problem, View, get, in_words, is_name, post

DECIDED_EACH = 20
"""Number of approvals of each state from which the list of decided approvals is made."""

NOT_PENDING = [state for state in ApprovalState if state is not ApprovalState.PENDING]

MOVED_ON = frozenset({"IDEMPOTENCY_CONFLICT", "APPROVAL_EXPIRED"})
"""Codes of engine errors which mean that an approval has changed since the page showed it."""

PERIODS = {"1h": ("1 hour", 1), "8h": ("8 hours", 8), "1d": ("1 day", 24), "7d": ("7 days", 168)}
"""Maps each value of the form's field for a rule's duration to its label, and to the number of
hours for which the remembered rule is valid."""

SESSION = "session"
"""The value of the form's field for a rule's duration if the rule is valid for its session."""


async def show(view: View) -> Response:
    """Show the inbox with the list of approvals, but without a selected approval.

    If the browser requests only a part of the page, send the placeholder that is shown instead of
    an approval.
    """
    if view.is_part:
        state = await view.control.approvals.changes()
        return view.render("inbox_none.html", pending=state.pending)
    return view.render("inbox.html", **await _list(view), approval=None)


async def show_list(view: View) -> Response:
    """Send only the list of approvals."""
    return view.render("inbox_list.html", **await _list(view))


async def show_one(view: View) -> Response:
    """Show the inbox with the list of approvals and one selected approval.

    If the browser requests only a part of the page, send only the approval, or nothing if the page
    already shows it.
    """
    approval = await view.control.approvals.show(view.path["approval_id"])
    if view.is_part:
        if view.query.get("version") == _mark(approval):
            return Response(status_code=204)
        return _detail(view, approval)
    values = await _list(view) | _of_detail(view, approval)
    return view.render("inbox.html", **values)


async def show_result(view: View) -> Response:
    """Send a short text about the outcome of an approval."""
    return view.render(
        "inbox_result.html", decided=await view.control.approvals.show(view.path["approval_id"])
    )


async def approve(view: View) -> Response:
    """Approve one approval. If the user has edited the arguments, approve the call with the edited
    arguments.
    """
    form, wish = view.form, None
    arguments = form.json("arguments") if form.get("arguments") else None
    if scope := form.get("scope"):
        wish = _make_wish(scope, form.get("uses"), form.all("same"), view.now)
    return await _decide(
        view,
        NewDecision(
            decision="approve",
            reason=_reason(view),
            arguments=arguments,
            remember=wish,
            action_digest=form.get("digest")[:100] or None,
        ),
    )


async def deny(view: View) -> Response:
    """Deny one approval."""
    return await _decide(view, NewDecision(decision="deny", reason=_reason(view)))


async def ask_to_deny(view: View) -> Response:
    """Show the form with which a user denies an approval and gives a reason."""
    approval = await view.control.approvals.show(view.path["approval_id"])
    return view.render("inbox_deny.html", approval=approval)


async def edit(view: View) -> Response:
    """Show the form with which a user edits the call's arguments."""
    approval = await view.control.approvals.show(view.path["approval_id"])
    return _edit_form(view, approval, fields_of(approval.arguments, await _schema(view, approval)))


async def check_edit(view: View) -> Response:
    """Show a preview of the call with the edited arguments. If the arguments are invalid, show the
    form again with error messages.
    """
    approval = await view.control.approvals.show(view.path["approval_id"])
    arguments, errors = arguments_of(view.form)
    if not errors:
        try:
            edited = await view.control.approvals.preview_edit(approval.id, arguments)
        except Refused as refused:
            if refused.code in MOVED_ON:
                return _detail(view, approval, _who_was_first(view, approval))
            error = refused.envelope.error
            errors = errors_of(error.fields if error else None, error.message if error else "")
        else:
            return view.render(
                "inbox_edited.html", approval=edited, version=view.form.get("version"),
                arguments=strict_json.dumps(arguments).decode(),
            )  # fmt: skip
    fields = fields_of(approval.arguments, await _schema(view, approval))
    general = "; ".join({e for name, e in errors.items() if name not in {f.name for f in fields}})
    return _edit_form(view, approval, as_sent(fields, view.form, errors), general)


async def ask_to_remember(view: View) -> Response:
    """Show the form with which a user turns an approval into a rule for similar calls, with a
    preview of the rule.
    """
    approval = await view.control.approvals.show(view.path["approval_id"])
    chosen = view.query
    scope = chosen.get("scope") or (SESSION if approval.session_id else "1h")
    same = chosen.all("same") if chosen.get("scope") else list(approval.arguments)
    rule: RememberedRule | None = None
    error = ""
    try:
        wish = _make_wish(scope, chosen.get("uses"), same, view.now)
        rule = await view.control.approvals.preview_remember(approval.id, wish)
    except (Refused, Problem) as refused:
        error = in_words(refused)
    return view.render(
        "inbox_remember.html", approval=approval, rule=rule, error=error, scope=scope, same=same,
        uses=chosen.get("uses"), periods=PERIODS,
    )  # fmt: skip


async def ask_several(view: View) -> Response:
    """Show the chosen approvals, and request one decision on all of them."""
    items = [_item(text) for text in view.query.all("item")]
    if not items:
        raise Problem("Choose the approvals to decide on.")
    found = await asyncio.gather(*(view.control.approvals.show(name) for name, _ in items))
    return view.render("inbox_several.html", approvals=found)


async def decide_several(view: View) -> Response:
    """Make one decision on several approvals. Either all of them are decided, or none."""
    decision = view.form.get("decision")
    if decision not in ("approve", "deny"):
        raise Problem("Choose to approve or to deny.")
    chosen = []
    for text in view.form.all("item"):
        name, version = _item(text)
        made = NewDecision(decision=decision, reason=_reason(view))  # type: ignore[arg-type]
        chosen.append(OneOfSeveral(approval_id=name, version=version, decision=made))
    decided = await view.control.approvals.decide_all(chosen)
    return view.render("inbox_decided.html", approvals=decided, decision=decision)


async def resolve(view: View) -> Response:
    """Record the outcome of a call that was interrupted because the engine ended."""
    outcome = view.form.get("outcome")
    if outcome not in ("done", "failed"):
        raise Problem("Choose an outcome.")
    approval = await view.control.approvals.resolve(
        view.path["approval_id"],
        outcome,  # type: ignore[arg-type]
        note=view.form.get("reason").strip() or None,
    )
    return _detail(view, approval)


async def raw(view: View) -> Response:
    """Send one part of an approval in full, such as its arguments, as a download."""
    approval = await view.control.approvals.show(view.path["approval_id"])
    name = view.query.get("name")
    parts: dict[str, Any] = {
        "preview": approval.preview,
        "context": context_in(approval.preview),
        "asked": approval.asked_arguments,
        "sends": approval.sends,
    }
    part = parts.get(view.query.get("part"), approval.arguments)
    if name and isinstance(part, dict):
        part = part.get(name)
    text = part if isinstance(part, str) else json_lines(part)
    return view.download(text, f"{approval.id}.txt")


async def _list(view: View) -> dict[str, Any]:
    """Return the values for the template that shows the list of approvals."""
    tab = _tab(view)
    listing = _decided(view) if tab == "decided" else _waiting(view)
    (found, older), state = await asyncio.gather(listing, view.control.approvals.changes())
    return {
        "approvals": found, "pending": state.pending, "tab": tab, "chosen": _chosen(view),
        "older": urlencode({"cursor": older}) if older else "",
        "open_id": view.path.get("approval_id"),
    }  # fmt: skip


def _tab(view: View) -> str:
    return view.query.one_of("tab", ("waiting", "decided"))


def _chosen(view: View) -> str:
    """Return the query string that selects the current list and the current page of that list.

    The query string is empty for the first page of the default list.
    """
    if _tab(view) == "decided":
        return "tab=decided"
    cursor = view.query.get("cursor")
    return urlencode({"cursor": cursor}) if cursor else ""


async def _waiting(view: View) -> tuple[Sequence[Approval], str | None]:
    page = await view.control.approvals.list(
        state=ApprovalState.PENDING, limit=MAX_PAGE, cursor=view.query.get("cursor") or None
    )
    return page.items, page.next_cursor


async def _decided(view: View) -> tuple[Sequence[Approval], None]:
    """Return the approvals that changed most recently, of all states except pending.

    The second value is the cursor of the next page. It is always None, because there is only one
    page.
    """
    listed = view.control.approvals.list
    pages = await asyncio.gather(
        *(listed(state=state, limit=DECIDED_EACH) for state in NOT_PENDING)
    )
    found = [one for page in pages for one in page.items]
    return sorted(found, key=_last_change, reverse=True)[:MAX_PAGE], None


async def _decide(view: View, decision: NewDecision) -> Response:
    """Make one decision. If the engine refuses the decision, show the approval with the reason.

    Otherwise, show the next pending approval or, if there is none, the decided approval.
    """
    approval_id = view.path["approval_id"]
    one = OneOfSeveral(
        approval_id=approval_id, version=view.form.number("version", 0), decision=decision
    )
    try:
        (approval,) = await view.control.approvals.decide_all([one])
    except Refused as refused:
        approval = await view.control.approvals.show(approval_id)
        words = _who_was_first(view, approval) if refused.code in MOVED_ON else in_words(refused)
        return _detail(view, approval, words)
    following = await _next(view, approval)
    if following is None:
        return _detail(view, approval)
    response = view.render("inbox_next.html", decided=approval, **_of_detail(view, following))
    response.headers["hx-push-url"] = f"/inbox/{following.id}"
    return response


async def _next(view: View, decided: Approval) -> Approval | None:
    """Return the pending approval that follows a decided approval in the list.

    If there is none, return the first pending approval. Return None if no approval is pending, or
    if the decided approval still needs more approvers.
    """
    if decided.state is ApprovalState.PENDING:  # it needs more approvers
        return None
    approvals = view.control.approvals
    for cursor in (decided.id, None):
        page = await approvals.list(state=ApprovalState.PENDING, limit=1, cursor=cursor)
        if page.items:
            return await approvals.show(page.items[0].id)
    return None


def _who_was_first(view: View, approval: Approval) -> str:
    """Explain why a decision came too late, for example because another approver decided first."""
    if words := approval.outlived_in_words:
        return f"Too late. {words}. Nothing was decided."
    if approval.state in (ApprovalState.EXPIRED, ApprovalState.CANCELLED):
        return f"Too late: this approval was {approval.state}. Nothing was decided."
    if approval.decisions:
        last = approval.decisions[-1]
        who = "You" if last.approver == view.login.principal_id else last.approver
        did = "denied" if last.decision == "deny" else "approved"
        return f"{who} {did} this first, at {last.at:%H:%M:%S} UTC. Your decision changed nothing."
    return "This has changed since you looked at it. Look again; nothing was decided."


def _detail(view: View, approval: Approval, problem: str = "") -> Response:
    return view.render("inbox_detail.html", **_of_detail(view, approval, problem))


def _of_detail(view: View, approval: Approval, problem: str = "") -> dict[str, Any]:
    has_voted = view.login.principal_id in approval.yes_votes
    return {"approval": approval, "mark": _mark(approval), "problem": problem,
            "has_voted": has_voted, "facts_of_place": _place_of(approval),
            "chosen": _chosen(view)}  # fmt: skip


def _mark(approval: Approval) -> str:
    """Return the approval's mark: a text that changes whenever a page must show the approval again.

    The approval's version is not sufficient, because the number of approvers whose decisions count
    can change without a new version.
    """
    return f"{approval.version}.{len(approval.counted)}"


def _place_of(approval: Approval) -> list[tuple[str, str]]:
    """Return where the call runs, its limits and its maximum cost. Each item is a pair of a name
    and a value.
    """
    binding = approval.binding
    if not binding:
        return []
    facts = [
        ("Runs", place_in_words(approval)),
        ("Limits", limits_in_words(binding.get("limits") or {})),
        ("Network", network_in_words(approval)),
        ("Variables of its session", ", ".join(binding.get("session_env") or ())),
        ("Costs up to", money(binding.get("cost_ceiling") or "0")),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in facts if value]


def _edit_form(
    view: View, approval: Approval, fields: list[ArgumentField], error: str = ""
) -> Response:
    return view.render("inbox_edit.html", approval=approval, fields=fields, error=error)


async def _schema(view: View, approval: Approval) -> JsonObject | None:
    """Return the schema of the parameters of the call's tool.

    Return None if the schema cannot be fetched, for example because the tool is external.
    """
    try:
        found = await view.caller.tool(f"{approval.tool}@{approval.tool_version}")
    except (Refused, DaemonUnavailable, ValueError):
        return None
    return found.tool.parameters


def _reason(view: View) -> str | None:
    reason = view.form.get("reason").strip().replace("\r\n", "\n")
    if len(reason) > 1000:
        raise Problem("The reason is too long: 1,000 characters at most.")
    return reason or None


def _make_wish(scope: str, uses: str, same: list[str], now: datetime) -> RememberWish:
    given: JsonObject = {"scope": SESSION, "arguments": tuple(same)}
    if scope != SESSION:
        if scope not in PERIODS:
            raise Problem("Choose how long the rule lasts.")
        given |= {"scope": "until", "until": now + timedelta(hours=PERIODS[scope][1])}
    if uses.strip():
        given["uses"] = Form([("The number of uses", uses)]).number("The number of uses", 1)
    try:
        return RememberWish(**given)
    except ValidationError:
        raise Problem("The number of uses is 1 to 1,000,000.") from None


def _item(text: str) -> tuple[str, int]:
    """Parse an item such as `apr_…@3`. Return the approval's id and the version that the page
    showed.
    """
    name, _, version = text.partition("@")
    if not is_name(name):
        raise Problem("This is not an approval.")
    return name, Form([("version", version)]).number("version", 0)


def _last_change(approval: Approval) -> datetime:
    return approval.ended_at or approval.started_at or approval.decided_at or approval.created_at


PAGE = Page(
    "Inbox",
    "/inbox",
    (
        get("/inbox", show),
        get("/inbox/list", show_list),
        get("/inbox/several", ask_several),
        post("/inbox/several", decide_several),
        get("/inbox/{approval_id}", show_one),
        get("/inbox/{approval_id}/result", show_result),
        post("/inbox/{approval_id}/approve", approve),
        get("/inbox/{approval_id}/deny", ask_to_deny),
        post("/inbox/{approval_id}/deny", deny),
        get("/inbox/{approval_id}/edit", edit),
        post("/inbox/{approval_id}/edit", check_edit),
        get("/inbox/{approval_id}/remember", ask_to_remember),
        post("/inbox/{approval_id}/resolve", resolve),
        get("/inbox/{approval_id}/raw", raw),
    ),
)
