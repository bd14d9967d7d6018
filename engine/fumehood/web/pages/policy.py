"""The policy: its rules with their counts, an explanation of the decision on a call, and a trial of
new rules.

A trial shows which past calls the new rules match.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from starlette.responses import Response

from fumehood.client.api_request import Refused
from fumehood.core.escaping import printable
from fumehood.web.view import Page, Problem, View, get, in_words, post

EXAMPLE = '[[rules]]\nid = "ask-for-shell"\ndecision = "ask"\ntools = ["run_shell"]\n'


async def show(view: View) -> Response:
    """Show the page with the rules and two forms. One form explains the decision on a call, and the
    other tries rules on past calls.
    """
    status = await view.control.policy.show()
    remembered = await view.control.approvals.remembered() if view.login.can_approve else ()
    file = None
    if view.login.can_administer and status.file is not None:
        with suppress(Refused):  # the file is now invalid or missing, which the page reports
            file = await view.control.policy.text()
    is_plain = file is not None and _is_plain(file.text)
    return view.render(
        "policy.html", policy=status, remembered=remembered, example=EXAMPLE,
        file=file if is_plain else None, is_odd=file is not None and not is_plain,
    )  # fmt: skip


async def explain(view: View) -> Response:
    """Show which decision the rules make on a call. The call is not made."""
    form = view.form
    arguments = form.json("arguments")
    try:
        found = await view.control.policy.explain(
            form.get("tool").strip(), arguments,
            principal_id=form.get("principal").strip() or None,
            agent_id=form.get("agent").strip() or None,
        )  # fmt: skip
    except Refused as refused:
        return _refused(view, refused)
    return _answer(view, explanation=found)


async def try_rules(view: View) -> Response:
    """Show which past calls the given rules match."""
    return await _tried(view, view.form.get("rules").replace("\r\n", "\n"))


async def check(view: View) -> Response:
    """Try an edited policy file on past calls. Show the result, and the form for saving the
    file.
    """
    text = _text(view)
    return await _tried(view, text, saves=text, version=view.form.get("version"))


async def save(view: View) -> Response:
    """Replace the policy file. The engine applies the new rules immediately."""
    try:
        await view.control.policy.replace(_text(view), view.form.get("version"))
    except Refused as refused:
        return _refused(view, refused)
    return view.go("/policy")


async def forget(view: View) -> Response:
    """Remove a remembered rule, which a user made from an approval."""
    await view.control.approvals.forget(view.path["rule_id"])
    return view.go("/policy")


def _text(view: View) -> str:
    """Return the text of the policy file that a form contains. Raises Problem if the text contains
    invisible characters.
    """
    text = view.form.get("text").replace("\r\n", "\n")
    if not _is_plain(text):
        raise Problem("These rules have invisible characters: change the file itself.")
    return text


def _is_plain(text: str) -> bool:
    """Return True if a page would show a text unchanged, so that a form can send it back
    unchanged.
    """
    plain = text.replace("\t", " ")
    return printable(plain) == plain


async def _tried(view: View, rules: str, **values: Any) -> Response:
    """Return the response that shows which calls of the last 7 days the rules in the text `rules`
    match. `values` are further values for the template.
    """
    if not rules.strip():
        raise Problem("Write a rule first.")
    try:
        tried = await view.control.policy.try_rules(rules, days=7)
    except Refused as refused:
        return _refused(view, refused)
    return _answer(view, tried=tried, **values)


def _refused(view: View, refused: Refused) -> Response:
    details = refused.envelope.error.details if refused.envelope.error else None
    faults = details.get("faults") if isinstance(details, dict) else None
    return _answer(view, error=in_words(refused), faults=faults or [])


def _answer(view: View, **values: Any) -> Response:
    nothing: dict[str, Any] = {
        "error": "", "faults": [], "explanation": None, "tried": None, "saves": None, "version": "",
    }  # fmt: skip
    return view.render("policy_answer.html", **(nothing | values))


PAGE = Page(
    "Policy",
    "/policy",
    (
        get("/policy", show),
        post("/policy/explain", explain),
        post("/policy/try", try_rules),
        post("/policy/check", check),
        post("/policy/save", save),
        post("/policy/remembered/{rule_id}/forget", forget),
    ),
)
