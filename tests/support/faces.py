"""Both HTTP applications of a daemon without its server, for requests of any user."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx2

from fumehood.core.fair_share import FairShare
from fumehood.core.identity import Peer
from fumehood.engine import Engine
from fumehood.http.app import Faces
from fumehood.http.peer import Face

from .http import Answer


class FacesClient:
    """Sends requests to an engine's applications directly."""

    def __init__(self, engine: Engine) -> None:
        self._faces = Faces(engine)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        face: Face = Face.CONTROL,
        credential: str | None = None,
        headers: list[tuple[str, str]] | None = None,
        uid: int | None = None,
    ) -> Answer:
        """Send one request. A body of bytes is sent unchanged."""
        peer = Peer(pid=1, uid=os.geteuid() if uid is None else uid, gid=0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"] = {
                "face": face, "peer": peer, "who": "1", "held_bytes": FairShare(1 << 30, 1 << 30),
                "has_left": lambda: False, "take_body": lambda: None,
            }  # fmt: skip
            await self._faces(scope, receive, send)

        sent = list(headers or [])
        if credential is not None:
            sent.append(("authorization", f"Bearer {credential}"))
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if content is not None:
            sent.append(("content-type", "application/json"))
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://fumehood") as client:
            found = await client.request(method, path, content=content, headers=sent)
        return Answer(found.status_code, dict(found.headers), found.json())
