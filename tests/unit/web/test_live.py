"""Live updates: one watcher for all pages, which says when the engine is away and when it is back."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood.web import app
from fumehood.web.app import MAX_STREAMS
from support.approvals import approval
from support.web import ALICE, BOB, Site, make_site

pytestmark = [pytest.mark.anyio, pytest.mark.row("A6")]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(app, "RETRY_S", 0.01)
    monkeypatch.setattr(app, "TICK_S", 0.02)
    return make_site(approval(1))


class Page:
    """The events of one open page."""

    def __init__(self, site: Site, login: Any) -> None:
        self._events = site.console.live.events(login)

    async def __aenter__(self) -> Page:
        assert await anext(self._events) == b"retry: 1000\n\n"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]

    async def next(self) -> bytes:
        """The next event that is no tick."""
        with anyio.fail_after(120):
            while (event := await anext(self._events)).startswith(b"event: tick"):
                pass
        return event

    async def tick(self) -> bytes:
        with anyio.fail_after(120):
            return await anext(self._events)


async def log_in(site: Site, credential: str = ALICE) -> Any:
    _, login = await site.console.logins.open(credential)
    return login


async def test_page_receives_the_number_of_pending_approvals(site: Site) -> None:
    async with Page(site, await log_in(site)) as page:
        assert await page.next() == b'event: approvals\ndata: {"pending":1}\n\n'
        site.engine.put(approval(2))
        assert await page.next() == b'event: approvals\ndata: {"pending":2}\n\n'


async def test_stream_of_a_closed_login_ends_with_an_event(site: Site) -> None:
    login = await log_in(site)
    async with Page(site, login) as page:
        await page.next()
        await site.console._end(login)
        assert await page.next() == b"event: logged-out\ndata: {}\n\n"
        with pytest.raises(StopAsyncIteration):
            await page.tick()
    async with Page(site, None) as page:
        assert await page.next() == b"event: logged-out\ndata: {}\n\n"


async def test_revoked_credential_receives_no_events_while_others_do(site: Site) -> None:
    alice, bob = await log_in(site), await log_in(site, BOB)
    async with Page(site, bob) as first, Page(site, alice) as second:
        await first.next()
        await second.next()
        site.engine.revoked.add(BOB)
        for number in (2, 3, 4):
            site.engine.put(approval(number))
            assert (await second.next()).startswith(b"event: approvals")
        while (event := await first.next()).startswith(b"event: approvals"):
            pass
        assert event == b"event: logged-out\ndata: {}\n\n"
        assert await site.console.logins.is_open(alice)


async def test_additional_page_pauses_the_oldest_stream(site: Site) -> None:
    login = await log_in(site)
    pages: list[Any] = []
    async with anyio.create_task_group():
        for _ in range(MAX_STREAMS + 1):
            pages.append(await Page(site, login).__aenter__())
            await pages[-1].tick()
        told = [await page.next() for page in pages]
        assert told[0] == b"event: paused\ndata: {}\n\n"
        assert all(one.startswith(b"event: approvals") for one in told[1:])
        for page in pages:
            await page.__aexit__()
