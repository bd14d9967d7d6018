"""The agents, with their tools."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from fumehood.web.view import Page, View, get

MAX_SHOWN = 200


async def show(view: View) -> Response:
    """Every agent with its tools. Needs `admin`."""
    if not view.login.can_administer:
        return view.render("agents.html", agents=[], is_cut=False)
    agents = await view.control.agents.list()
    shown = agents[:MAX_SHOWN]
    details = await asyncio.gather(*(view.control.agents.show(one.id) for one in shown))
    return view.render("agents.html", agents=details, is_cut=len(agents) > MAX_SHOWN)


PAGE = Page("Agents", "/agents", (get("/agents", show),))
