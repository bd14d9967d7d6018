"""The pages of the console, in the order of the navigation."""

from __future__ import annotations

from fumehood.web.pages import (
    calls,
    charts,
    health,
    inbox,
    policy,
    search,
    sessions,
    tools,
    usage,
)

PAGES = (
    inbox.PAGE, calls.PAGE, charts.PAGE, tools.PAGE, tools.AGENTS, sessions.PAGE, health.NODES,
    usage.PAGE, policy.PAGE, health.PAGE, search.PAGE,
)  # fmt: skip
