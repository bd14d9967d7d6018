"""The pages of the console, in the order of the navigation."""

from __future__ import annotations

from fumehood.web.pages import calls, health, inbox, policy, sessions, tools, usage

PAGES = (
    inbox.PAGE, calls.PAGE, tools.PAGE, tools.AGENTS, sessions.PAGE, usage.PAGE, policy.PAGE,
    health.PAGE,
)  # fmt: skip
