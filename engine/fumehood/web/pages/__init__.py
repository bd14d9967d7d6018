"""The pages, in the order of the navigation."""

from __future__ import annotations

from fumehood.web.pages import agents, calls, health, inbox, policy, sessions, tools, usage

PAGES = (
    inbox.PAGE, calls.PAGE, tools.PAGE, agents.PAGE, sessions.PAGE, usage.PAGE, policy.PAGE,
    health.PAGE,
)  # fmt: skip
