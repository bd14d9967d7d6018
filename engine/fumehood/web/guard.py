"""The guard around all pages: checks the origin of each request, and sets headers of each response.

Invariants: a request with another host name or another origin is refused; a request that changes
anything must have this server's origin; every response, including errors, has `HEADERS`. With these
headers, a browser runs scripts and loads content only from this server, whatever text a page shows.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fumehood.protocol.loopback import why_not_ours

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

SANDBOX = "sandbox; default-src 'none'"
"""The stricter content policy for a response with untrusted content that is sent unchanged."""

HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: with it browsers send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "x-frame-options": "DENY",
}

SAFE = frozenset({"GET", "HEAD"})
"""Methods that change nothing, so their requests need no `Origin` header."""


class Guard:
    """Wraps an ASGI application: refuses requests with a wrong host name or origin, and adds
    `HEADERS` to all responses.
    """

    def __init__(self, app: ASGIApp, names: Callable[[], frozenset[str]]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                own = headers.get("content-security-policy", "")
                headers.update(HEADERS)
                if own == SANDBOX:
                    headers["content-security-policy"] = own
                headers.setdefault("cache-control", "no-store")
            await send(message)

        why = self._refusal(scope)
        app = self._app if why is None else PlainTextResponse(f"{why}\n", status_code=403)
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        why = why_not_ours(self._names(), scope["headers"])
        has_origin = any(name == b"origin" for name, _ in scope["headers"])
        if why is None and scope["method"] not in SAFE and not has_origin:
            return "This request does not say which page it comes from."
        return why
