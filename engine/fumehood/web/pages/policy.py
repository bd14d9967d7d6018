"""The policy: its rules with their counts, the decision on one call explained, and new rules tried
on past calls."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from fumehood.client.api_request import Refused
from fumehood.web.view import Page, Problem, View, get, in_words, post

EXAMPLE = '[[rules]]\nid = "ask-for-shell"\ndecision = "ask"\ntools = ["run_shell"]\n'


async def show(view: View) -> Response:
    """Show the rules, and two forms that change nothing."""
    status = await view.control.policy.show()
    remembered = await view.control.approvals.remembered() if view.login.can_approve else ()
    return view.render("policy.html", policy=status, remembered=remembered, example=EXAMPLE)


async def explain(view: View) -> Response:
    """Explain what the rules decide for a call. The call is not made."""
    form = view.form
    arguments = form.json("arguments")
    try:
        found = await view.control.policy.explain(
            form.get("tool").strip(), arguments,
            principal_id=form.get("principal").strip() or None,
            agent_id=form.get("agent").strip() or None,
        )  # fmt: skip
    except Refused as refused:
        return _answer(view, error=in_words(refused))
    return _answer(view, explanation=found)


async def try_rules(view: View) -> Response:
    """Show which past calls the given rules match."""
    rules = view.form.get("rules").replace("\r\n", "\n")
    if not rules.strip():
        raise Problem("Write a rule first.")
    try:
        tried = await view.control.policy.try_rules(rules, days=7)
    except Refused as refused:
        details = refused.envelope.error.details if refused.envelope.error else None
        faults = details.get("faults") if isinstance(details, dict) else None
        return _answer(view, error=in_words(refused), faults=faults or [])
    return _answer(view, tried=tried)


def _answer(view: View, **values: Any) -> Response:
    nothing: dict[str, Any] = {"error": "", "faults": [], "explanation": None, "tried": None}
    return view.render("policy_answer.html", **(nothing | values))


PAGE = Page(
    "Policy",
    "/policy",
    (get("/policy", show), post("/policy/explain", explain), post("/policy/try", try_rules)),
)
