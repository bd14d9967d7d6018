"""Applications that parts mount at paths of the callers' socket."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from fumehood import Config, Engine
from fumehood.core.identity import Principal, Scope
from fumehood.core.part import Part, PartError
from fumehood.http import app as module
from fumehood.http.peer import NOBODY, Face
from fumehood.testing import FakeWall
from support.faces import FacesClient

pytestmark = pytest.mark.anyio

ROOT = Principal("init", frozenset({Scope.ADMIN}))


def mounted(engine: Engine) -> ASGIApp:
    """Return an application that checks nothing itself."""
    return JSONResponse({"mounted": True})


@pytest.mark.parametrize(
    ("face", "path", "has_token", "status"),
    [
        (Face.ENGINE, "/there", False, 200),
        (Face.ENGINE, "/there/", False, 404),
        (Face.CONTROL, "/there", True, 404),
        (Face.TCP, "/there", False, 401),
        (Face.TCP, "/there", True, 200),
    ],
)
async def test_mount_is_reached_on_the_callers_socket_only_and_over_tcp_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, face: Face, path: str, has_token: bool,
    status: int,
) -> None:  # fmt: skip
    part = Part(name="fake", mounts={"/there": "fake:mounted"})
    monkeypatch.setattr(module, "parts", lambda: (part,))
    monkeypatch.setattr(module, "imported", lambda place: mounted)
    config = Config(home=tmp_path, tcp="127.0.0.1:8321", tcp_behind_proxy=True)
    async with Engine(config=config, interpreter=FakeWall()) as engine:
        _, token = await engine.tokens.new(
            "a", principal_id="token:a", scopes=[Scope.CALL], agents=(), expires_at=None,
            by=ROOT, now=engine.now(),
        )  # fmt: skip
        answer = await FacesClient(engine).ask(
            "GET",
            path,
            face=face,
            credential=token if has_token else None,
            uid=NOBODY.uid if face is Face.TCP else None,
        )
    assert answer.status == status
    assert (answer.body == {"mounted": True}) is (status == 200)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/tools", "/v1/tools/calculator/call"])
async def test_part_cannot_mount_an_operations_address(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    part = Part(name="fake", mounts={path: "fake:mounted"})
    monkeypatch.setattr(module, "parts", lambda: (part,))
    with pytest.raises(PartError, match=f"'{path}', which is the address of an operation"):
        module.Faces(cast("Engine", None))
