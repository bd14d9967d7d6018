"""The console: its routes, the checks before each handler, and login and logout.

Live updates: one watcher polls the engine while a page is open, and notifies every browser.

The watcher only notifies a browser that something has changed. The browser then fetches the changed
content with its own login. The events of `/events` (server-sent events):

| event | data | meaning |
|---|---|---|
| `approvals` | `{"pending": 3}` | approvals have changed; also the first event, and after `away` |
| `tick` | `{}` | every `TICK_S`, for pages whose content has no event |
| `away` | `{}` | the engine does not answer; the watcher keeps trying |
| `paused` | `{}` | a page of this login was opened later, and browsers have few connections |
| `logged-out` | `{}` | the login has ended |

Invariant: one request to the engine serves all browsers; no request is sent while no page is open.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.client.async_client import AsyncClient
from fumehood.core.errors import ERROR_CODES
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.protocol.loopback import own_names
from fumehood.web.guard import Guard
from fumehood.web.logins import LONGEST_S, Connect, Login, Logins
from fumehood.web.pages import PAGES
from fumehood.web.ports import Ports
from fumehood.web.text import STATIC, make_environment
from fumehood.web.view import (
    CSRF_HEADER,
    Address,
    Form,
    Page,
    Problem,
    View,
    go,
    in_words,
    is_name,
    read_form,
)

TICK_S = 2.0
"""Seconds between two `tick` events."""

POLL_S = 20.0
"""Seconds for which one request to the engine waits for a change."""

RETRY_S = 0.5
"""Seconds between a failed request to the engine and the next request."""

TOGETHER_S = 0.1
"""Seconds for which the watcher pauses after an event, so that further changes share one event."""

MAX_STREAMS = 4
"""Maximum number of event streams of one login. Browsers open only six connections to a server, so
two remain for pages."""

LOST_AUTHORITY = frozenset({"UNAUTHORIZED", "PERMISSION_DENIED"})
"""Codes of engine errors after which the console ends the login."""


@dataclass(eq=False, slots=True)
class _Stream:
    login: Login
    woken: anyio.Event = field(default_factory=anyio.Event)
    is_paused: bool = False


class Live:
    """The live updates: a watcher, which polls the engine, and an event stream to each open
    page.
    """

    def __init__(self, logins: Logins) -> None:
        self._logins = logins
        self._streams: list[_Stream] = []
        self._watcher: asyncio.Task[None] | None = None
        self._last: bytes | None = None
        """The last event about approvals or the engine. Each new stream begins with this event."""
        self._is_stopping = False

    async def events(self, login: Login | None) -> AsyncIterator[bytes]:
        """Yield the server-sent events for one page, as encoded bytes.

        If `login` is None, yield only the event `logged-out`.
        """
        yield b"retry: 1000\n\n"
        if login is None:
            yield _event("logged-out")
            return
        stream, told = self._open(login), None
        try:
            while not self._is_stopping:
                if stream.is_paused or not await self._logins.is_open(login):
                    yield _event("paused" if stream.is_paused else "logged-out")
                    return
                if self._last is not told and self._last is not None:
                    told = self._last
                    yield told
                else:
                    yield _event("tick")
                with anyio.move_on_after(TICK_S):
                    await stream.woken.wait()
                stream.woken = anyio.Event()
        finally:
            self._close(stream)

    def wake(self) -> None:
        """Wake every stream, which then checks its login and sends new events. Used after a logout,
        for example.
        """
        for stream in self._streams:
            stream.woken.set()

    def stop(self) -> None:
        """End every stream. Browsers reconnect by themselves if the console is still running."""
        self._is_stopping = True
        self.wake()

    def _open(self, login: Login) -> _Stream:
        stream = _Stream(login)
        own = [one for one in self._streams if one.login is login and not one.is_paused]
        if len(own) >= MAX_STREAMS:
            own[0].is_paused = True
            own[0].woken.set()
        self._streams.append(stream)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return stream

    def _close(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        if not self._streams and self._watcher is not None:
            self._watcher.cancel()
            self._watcher = self._last = None

    async def _watch(self) -> None:
        after, turn = -1, 0
        while True:
            # The logins take turns, so that one whose credential was revoked is noticed.
            turn += 1
            login = self._streams[-turn % len(self._streams)].login
            try:
                found = await login.control.approvals.changes(after, wait_s=POLL_S)
            except (DaemonUnavailable, Refused, RuntimeError) as error:
                # RuntimeError: this login has just ended, and its client is closed.
                after = -1
                if isinstance(error, Refused) and error.code in LOST_AUTHORITY:
                    await self._logins.close(login)
                    self.wake()
                elif not isinstance(error, RuntimeError):
                    self._tell(_event("away"))
                await anyio.sleep(RETRY_S)
                continue
            if found.changes != after:
                after = found.changes
                self._tell(_event("approvals", {"pending": found.pending}))
            await anyio.sleep(TOGETHER_S)

    def _tell(self, event: bytes) -> None:
        self._last = event
        self.wake()


def _event(name: str, data: JsonObject | None = None) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), strict_json.dumps(data or {}))


# -- the console ----------------------------------------------------------------------------

HOME = "/inbox"
MAX_LOGIN_BYTES = 16_384
"""Maximum size of a login form in bytes. The limit is low, because any process on this machine can
send such a form."""

LINK_OVER = (
    "This link was used already, or its five minutes are over. Enter a credential, or start "
    "fumehood web again for another link."
)


class Console:
    """The console's application, with its logins, live updates, templates and clients."""

    def __init__(
        self,
        connect: Connect,
        caller: AsyncClient,
        port: int,
        pages: Sequence[Page] = PAGES,
        *,
        callers: Path = Path(),
    ) -> None:
        """Create the console.

        `connect` creates a client of the control socket for a credential. `callers` is the path of
        the socket for calls, and `caller` is a client of this socket. `port` is the local port that
        browsers use, and `pages` are the console's pages.
        """
        self.port = port
        self.callers = callers
        self.ports = Ports(callers)
        self.logins = Logins(connect)
        self.live = Live(self.logins)
        self.caller = caller
        self.pages = pages
        self._environment = make_environment()
        routes = [
            Route("/", self._home),
            Route("/login", self._login_page),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/events", self._events),
            Route("/static/{name}", self._static),
            self._route(Address("POST", "/logout", self._log_out)),
            *(self._route(one) for page in pages for one in page.addresses),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._http_error},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False
        self.app = Guard(app, lambda: own_names("127.0.0.1", self.port))

    @property
    def cookie_name(self) -> str:
        """The name of the cookie of a login. The name contains the port, because browsers send a
        cookie to all ports of a host.
        """
        return f"fumehood_{self.port}"

    def link(self, credential: str) -> str:
        """Return a URL that logs a browser in with this credential. The URL can be used once."""
        return f"http://127.0.0.1:{self.port}/login?token={self.logins.new_link(credential)}"

    def render(
        self, template: str, status: int = 200, *, login: Login | None = None, path: str = "",
        **values: Any,
    ) -> HTMLResponse:  # fmt: skip
        """Render a template as a response with the HTTP status `status`. `login` is the login of
        the user, or None on pages without one. `path` is the page's address, which the navigation
        highlights. `values` are further values for the template.
        """
        page = next((one for one in self.pages if path.startswith(one.path)), None)
        text = self._environment.get_template(template).render(
            login=login, pages=self.pages, page=page, path=path, **values
        )
        return HTMLResponse(text, status)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            self.ports.group = group
            yield
            group.cancel_scope.cancel()
        await self.logins.close_all()
        await self.caller.close()

    def _route(self, address: Address) -> Route:
        async def endpoint(request: Request) -> Response:
            if not all(map(is_name, request.path_params.values())):
                raise HTTPException(404)
            return await self._guarded(request, address)

        return Route(address.path, endpoint, methods=[address.method])

    async def _guarded(self, request: Request, address: Address) -> Response:
        """Run the handler of `address` for the user who is logged in. If nobody is logged in,
        redirect to the login page.

        An exception of the handler becomes a response with a message.
        """
        login = await self.logins.of_cookie(request.cookies.get(self.cookie_name))
        if login is None:
            return go(request, "/login")
        view = View(self, request, login)
        try:
            return await self._handled(view, address)
        except Problem as problem:
            return view.notice(problem.message, problem.status)
        except DaemonUnavailable as away:
            if view.is_part:
                return view.notice(_away_in_words(away, address.method), 503)
            return view.render("away.html", 503)
        except Refused as refused:
            if refused.code == "UNAUTHORIZED":
                await self._end(login)
                return go(request, "/login")
            known = ERROR_CODES.get(refused.code)
            return view.notice(in_words(refused), known.http_status if known else 409)
        except Exception:
            return await self._faulty(view)

    async def _handled(self, view: View, address: Address) -> Response:
        if address.method != "GET":
            view.form = await read_form(view.request)
            given = view.request.headers.get(CSRF_HEADER) or view.form.get("csrf")
            if not view.login.is_csrf(given):
                raise Problem("This form is not of this login. Load the page again.", 403)
        response = await address.handler(view)
        if view.login.ended.is_set() and address.path != "/logout":
            return view.go("/login")
        return response

    async def _faulty(self, view: View) -> Response:
        """Return the response after an unexpected exception of a handler.

        If the login has ended, which can cause such an exception, redirect to the login page.
        Otherwise, print the traceback and report a fault of the console.
        """
        if not await self.logins.is_open(view.login):
            return view.go("/login")
        traceback.print_exc()
        return view.notice("The console has a fault. Its terminal says more.", 500)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        login = await self.logins.of_cookie(request.cookies.get(self.cookie_name))
        words = "There is no such page." if status == 404 else "This request is not possible."
        return self.render("message.html", status, login=login, message=words)

    async def _home(self, request: Request) -> Response:
        return go(request, HOME)

    async def _events(self, request: Request) -> Response:
        login = await self.logins.of_cookie(request.cookies.get(self.cookie_name))
        return StreamingResponse(self.live.events(login), media_type="text/event-stream")

    async def _static(self, request: Request) -> Response:
        path = next(
            (one for one in STATIC.iterdir() if one.name == request.path_params["name"]), None
        )
        if path is None:
            raise HTTPException(404)
        # Its address changes with its content.
        forever = {"cache-control": "public, max-age=31536000, immutable"}
        return FileResponse(path, headers=forever)

    async def _login_page(self, request: Request) -> Response:
        token = request.query_params.get("token", "")
        return self.render("login.html", token=token, message="")

    async def _log_in(self, request: Request) -> Response:
        try:
            form = await read_form(request, MAX_LOGIN_BYTES)
            credential = await self._credential(form)
            cookie, _ = await self.logins.open(credential)
        except Problem as problem:
            return self.render("login.html", problem.status, token="", message=problem.message)
        except DaemonUnavailable:
            words = "The engine does not answer. Start it with fumehood serve, then try again."
            return self.render("login.html", 503, token="", message=words)
        except (ValueError, Refused) as error:
            is_limited = isinstance(error, Refused) and error.code == "RATE_LIMITED"
            words = "Too many attempts. Wait a moment." if is_limited else UNKNOWN_CREDENTIAL
            return self.render("login.html", 429 if is_limited else 403, token="", message=words)
        old = await self.logins.of_cookie(request.cookies.get(self.cookie_name))
        if old is not None:
            await self._end(old)
        response = go(request, HOME)
        response.set_cookie(
            self.cookie_name, cookie, max_age=int(LONGEST_S), path="/", httponly=True,
            samesite="strict",
        )  # fmt: skip
        return response

    async def _credential(self, form: Form) -> str:
        token = form.get("token")
        if not token:
            return form.get("credential").strip()
        found = self.logins.use_link(token)
        if found is None:
            raise Problem(LINK_OVER, 403)
        return found

    async def _log_out(self, view: View) -> Response:
        await self._end(view.login)
        response = view.go("/login")
        response.delete_cookie(self.cookie_name, path="/", httponly=True, samesite="strict")
        return response

    async def _end(self, login: Login) -> None:
        await self.logins.close(login)
        self.live.wake()


UNKNOWN_CREDENTIAL = "This credential is unknown, or has neither approve nor admin."


def _away_in_words(away: DaemonUnavailable, method: str) -> str:
    if away.may_have_acted:
        return "The engine went away before it answered. See whether the change was made."
    # A GET may only follow a call, and the call may have changed something.
    return "The engine is away." + (" Nothing was changed." if method != "GET" else "")
