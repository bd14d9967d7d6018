"""The console: its routes, the checks before each handler, and login and logout."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
from fumehood.protocol.loopback import own_names
from fumehood.web.guard import Guard
from fumehood.web.live import Live
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

HOME = "/inbox"
MAX_LOGIN_BYTES = 16_384
"""Maximum size of a login form in bytes. Any process on this machine may send one."""

LINK_OVER = (
    "This link was used already, or its five minutes are over. Enter a credential, or start "
    "fumehood web again for another link."
)


class Console:
    """One web console: logins, live updates, templates, and the clients for its requests."""

    def __init__(
        self,
        connect: Connect,
        caller: AsyncClient,
        port: int,
        pages: Sequence[Page] = PAGES,
        *,
        callers: Path = Path(),
    ) -> None:
        """`connect` makes clients of the control socket; `caller` reads at the callers' socket,
        whose path is `callers`.
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
        """The name of the login's cookie. It contains the port, because browsers send a cookie to
        all ports of a host."""
        return f"fumehood_{self.port}"

    def link(self, credential: str) -> str:
        """Return a URL that logs in with this credential, once."""
        return f"http://127.0.0.1:{self.port}/login?token={self.logins.new_link(credential)}"

    def render(
        self, template: str, status: int = 200, *, login: Login | None = None, path: str = "",
        **values: Any,
    ) -> HTMLResponse:  # fmt: skip
        """Render a template as a response."""
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
        """Run a handler for a logged-in user. Errors become pages."""
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
                return view.notice(_away_in_words(away), 503)
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
        """Answer for a handler that failed, by its fault or because its login has ended."""
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


def _away_in_words(away: DaemonUnavailable) -> str:
    if away.may_have_acted:
        return "The engine went away before it answered. See whether the change was made."
    return "The engine is away; nothing was changed."
