"""Pages of the console, and the requests that they handle.

How to add a page:

1. Write `pages/calls.py`. A handler takes a `View` and returns a response:

       async def show(view: View) -> Response:
           found = await view.caller.calls(limit=50)
           return view.render("calls.html", calls=found.items)

       async def cancel(view: View) -> Response:
           await view.caller.cancel(view.path["call_id"])
           return view.go("/calls")

       PAGE = Page(
           "Calls", "/calls", (get("/calls", show), post("/calls/{call_id}/cancel", cancel))
       )

2. Write `templates/calls.html`; it begins with `{% extends "base.html" %}` and fills the block
   `main`. A part of the page that is also fetched alone (`hx-get`) has its own template, which the
   page's template includes. `parts.html` has the macros: `badge`, `block` (long text), `empty`,
   `csrf`.
3. Add `calls.PAGE` to `PAGES` in `pages/__init__.py`. The order of `PAGES` is also that of the
   navigation.

A handler can rely on this: it runs for logged-in users only; the origin and the token of a POST
have been checked; `Refused` and `DaemonUnavailable` become a page or, for a part, a notice;
everything that a template prints is escaped. A handler raises `Problem` for a fault of the request.

Rules: a GET changes nothing. No `style=`, no `<script>`, no `hx-on`, no `hx-vals='js:…'`, no filter
in `hx-trigger`: the content policy forbids them, and `tests/acceptance/test_web.py` fails. Widths
of bars are SVG attributes. A page refreshes by `hx-trigger="live-approvals from:body"` or
`hx-trigger="live-tick from:body"` (every 2 s), never by its own timer. A comment at the top of
`static/app.css` lists the CSS classes. Untrusted files are sent with `view.download`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from fumehood.core.call import MAX_KEYS
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.protocol import strict_json
from fumehood.web.guard import SANDBOX
from fumehood.web.logins import Login

if TYPE_CHECKING:
    from fumehood.web.app import Console

FORM_S = 30.0
"""Seconds within which a form must arrive."""

MAX_FORM_FIELDS = 2 * MAX_KEYS + 10
"""Maximum number of fields in a form: two for each argument of a call, and ten others."""

FORM = "application/x-www-form-urlencoded"

CSRF_HEADER = "x-csrf-token"
"""The header in which scripts send the login's token. Forms send the token in a field."""

NAME = re.compile(r"[!-.0-~]{1,100}", re.ASCII)
"""Matches an id or a name in a URL: printable ASCII without spaces and slashes."""


class Problem(Exception):
    """A user's request cannot be carried out. The message is shown to the user and says why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def is_name(text: str) -> bool:
    """Return True if a text can be an id or a name in a URL. Texts that would make the URL lead to
    another page are excluded.
    """
    return NAME.fullmatch(text) is not None and text not in (".", "..")


def query_of(**parts: str) -> str:
    return "&".join(f"{key}={quote(value, safe='')}" for key, value in parts.items() if value)


def mark_of(state: object) -> str:
    """Return the mark of a state: a short hash of it. A page can compare two marks to detect a
    change.
    """
    return sha256(repr(state).encode("utf-8", "replace")).hexdigest()[:16]


def in_words(refused: Exception) -> str:
    """Return the message of the engine's refusal, without the advice that is meant for programs."""
    return str(refused).removesuffix(" Do not retry.")


class Form:
    """The fields of a form or of a query. A field may occur several times with different values."""

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self.fields = fields

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a field, or `default` if the field is missing."""
        return next((value for key, value in self.fields if key == name), default)

    def all(self, name: str) -> list[str]:
        """Return every value of a field."""
        return [value for key, value in self.fields if key == name]

    def one_of(self, name: str, choices: Iterable[str]) -> str:
        """Return the first value of a field if it is one of `choices`. Otherwise, return the first
        choice.
        """
        first, *others = choices
        return self.get(name) if self.get(name) in others else first

    def number(self, name: str, default: int) -> int:
        """Return the value of a field as a whole number, or the default if the field is blank.

        Raises:
            Problem: the field is neither blank nor a whole number.
        """
        given = self.get(name).strip()
        if not given:
            return default
        if not (given.isascii() and given.isdigit() and len(given) < 10):
            raise Problem(f"{name} is not a whole number.")
        return int(given)

    def json(self, name: str) -> JsonObject:
        """Return the value of a field as a JSON object, which is empty if the field is blank.

        Raises:
            Problem: the field is neither blank nor a JSON object.
        """
        try:
            found = strict_json.loads(self.get(name).strip().encode() or b"{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Problem(f"The {name} are not a JSON object.")
        return found


class View:
    """One request of a logged-in user. Its methods make the responses."""

    def __init__(self, console: Console, request: Request, login: Login) -> None:
        self.console = console
        self.request = request
        self.path: Mapping[str, str] = request.path_params
        self.login = login
        self.control = login.control
        """A client of the control socket with this user's credential."""
        self.caller = console.caller
        """A client of the callers' socket without a credential. It acts as the user who runs this
        process."""
        self.form = Form([])
        """The fields of a POST request. Empty for a GET request."""
        self.query = Form(request.query_params.multi_items())
        self.now = datetime.now(UTC)

    async def may_administer(self) -> bool:
        """Return whether the user still has the scope `admin`, according to the engine.

        `View.caller` acts with the rights of the user who runs the console. Handlers must therefore
        call this method before they use `View.caller`.

        Raises:
            Refused: the engine refused the credential.
            DaemonUnavailable: the engine does not answer.
        """
        return "admin" in (await self.control.whoami()).scopes

    @property
    def is_part(self) -> bool:
        """Whether the browser requests only a part of the page, to insert it into the page that is
        open.
        """
        headers = self.request.headers
        return "hx-request" in headers and "hx-history-restore-request" not in headers

    def render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Render a template as a response. `template` names the template of a page or of a part of
        a page.
        """
        return self.console.render(
            template, status, login=self.login, now=self.now, path=self.request.url.path, **values
        )

    def go(self, address: str) -> Response:
        """Return a response that redirects the browser to another page of the console."""
        return go(self.request, address)

    def notice(self, message: str, status: int = 200) -> Response:
        """Return a response that shows a message in the corner of the open page. The rest of the
        page stays unchanged.

        If the browser requests a whole page, the response is a page with the message.
        """
        if not self.is_part:
            return self.render("message.html", status, message=message)
        response = self.render("notice.html", status, message=message)
        response.headers["hx-retarget"] = "#notices"
        response.headers["hx-reswap"] = "innerHTML"
        return response

    def part(self, template: str, mark: str, **values: Any) -> Response:
        """Render `template`, a part of a page. The page requests this part repeatedly. If the page
        already shows the current content, return an empty response.

        `mark` is a hash of the current content (`mark_of`), which is compared with the mark in the
        request. `values` are further values for the template.
        """
        if self.query.get("mark") == mark:
            return Response(status_code=204)
        return self.render(template, mark=mark, **values)

    @staticmethod
    def download(content: str | bytes, name: str) -> Response:
        """Return a response with untrusted content as a download. Browsers neither show nor run the
        content.
        """
        raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
        safe = quote(name[-150:], safe="")
        return Response(
            raw,
            media_type="text/plain; charset=utf-8",
            headers={
                "content-disposition": f"attachment; filename*=UTF-8''{safe}",
                "content-security-policy": SANDBOX,
            },
        )


Handler = Callable[[View], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Address:
    """One route: a method, a path and the handler of its requests."""

    method: str
    path: str
    handler: Handler


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the console, with its routes."""

    title: str
    path: str
    addresses: tuple[Address, ...]
    is_listed: bool = True
    """Whether the navigation lists the page."""


def get(path: str, handler: Handler) -> Address:
    """Return a route that shows a page or a part of a page. Its requests change nothing."""
    return Address("GET", path, handler)


def post(path: str, handler: Handler) -> Address:
    """Return a route whose requests change something."""
    return Address("POST", path, handler)


def go(request: Request, address: str) -> Response:
    """Return a response that redirects to another page of the console. If the page's script has
    sent the request, the script performs the redirect, otherwise the browser does.
    """
    if "hx-request" in request.headers:
        return Response(status_code=200, headers={"hx-redirect": address})
    return RedirectResponse(address, status_code=303)


async def read_form(request: Request, most: int = MAX_BODY_BYTES) -> Form:
    """Read the fields of a form that a request contains.

    Raises:
        Problem: the body is not a form, is too large, or did not arrive within `FORM_S` seconds.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise Problem("This is not a form.", 415)
    raw = bytearray()
    try:
        async with asyncio.timeout(FORM_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > most:
                    raise Problem("This form is too large.", 413)
        fields = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, encoding="utf-8", errors="strict",
            max_num_fields=MAX_FORM_FIELDS,
        )  # fmt: skip
    except (ValueError, TimeoutError, ClientDisconnect):
        raise Problem("This form cannot be read.") from None
    return Form(fields)
