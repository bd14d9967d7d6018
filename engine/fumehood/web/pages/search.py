"""The search field of every page, which finds pages, tools, sessions, agents and calls by name."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from starlette.responses import Response

from fumehood.web.view import Page, View, get, is_name, query_of

MOST = 8
"""Maximum number of results of one kind."""

IDS = {"call_": "/calls/", "sess_": "/sessions/", "apr_": "/inbox/"}
"""Maps the prefix of an id to the prefix of the address of the page for the object with that id."""


@dataclass(frozen=True, slots=True)
class Result:
    """One search result: its kind, its name, and the address of its page."""

    kind: str
    name: str
    address: str


async def show(view: View) -> Response:
    """Send the list of results while the user types. After Enter, redirect to the first result's
    page.
    """
    wanted = view.query.get("q").strip()
    results = await _found(view, wanted)
    if view.is_part:
        return view.render("search_results.html", results=results)
    if results and wanted:
        return view.go(results[0].address)
    return view.render("search.html", results=results, wanted=wanted)


async def _found(view: View, wanted: str) -> list[Result]:
    for start, address in IDS.items():
        if wanted.startswith(start) and is_name(wanted):
            return [Result("id", wanted, address + wanted)]
    low = wanted.lower()
    pages = [page for page in view.console.pages if page.is_listed and low in page.title.lower()]
    found = [Result("page", page.title, page.path) for page in pages]
    if not wanted:
        return found
    tools = sorted(one.name for one in await view.caller.tools() if low in one.name.lower())
    found += (Result("tool", name, f"/tools/{quote(name, safe='')}") for name in tools[:MOST])
    sessions = [
        one for one in await view.control.sessions.list() if low in (one.name or "").lower()
    ]
    found += (
        Result("session", one.name or one.id, f"/sessions/{one.id}") for one in sessions[:MOST]
    )
    if view.login.can_administer:
        agents = sorted(one.id for one in await view.control.agents.list() if low in one.id.lower())
        found += (Result("agent", one, f"/calls?{query_of(agent=one)}") for one in agents[:MOST])
        found.append(Result("calls with the words", wanted, f"/calls?{query_of(text=wanted)}"))
    return [*found, Result("calls, by", wanted, f"/calls?{query_of(q=wanted)}")]


PAGE = Page("Search", "/search", (get("/search", show),), is_listed=False)
