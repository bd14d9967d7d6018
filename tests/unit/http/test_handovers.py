"""Requests that get their connection from a part, on the callers' socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request

from fumehood import Config, Engine
from fumehood.core.errors import EngineError, Unauthorized
from fumehood.core.part import Part
from fumehood.http import app as module
from fumehood.http.peer import NOBODY, Face, Handovers
from fumehood.ports.handover import HANDOVERS, is_for_port
from fumehood.testing import FakeWall
from support.faces import FacesClient

pytestmark = pytest.mark.anyio

GIVEN: Any = object()
OWN = [Handovers(lambda path: path == b"/own", lambda engine, request, upgrade: GIVEN)]
OTHER = [Handovers(lambda path: path.startswith(b"/o"), lambda engine, request, upgrade: None)]  # type: ignore[arg-type, return-value]


def faces_of(
    monkeypatch: pytest.MonkeyPatch, *places: list[Handovers], engine: Engine | None = None
) -> module.Faces:
    """The applications of an engine whose parts have these handovers."""
    found = {f"fake:{number}": place for number, place in enumerate(places)}
    parts = tuple(Part(name=name, handovers=name) for name in found)
    monkeypatch.setattr(module, "parts", lambda: (*parts, Part(name="fake:none")))
    monkeypatch.setattr(module, "imported", found.__getitem__)
    return module.Faces(cast("Engine", engine))


def request_of(path: bytes, face: Face = Face.ENGINE) -> Request:
    state = {"face": face, "peer": NOBODY, "who": "1"}
    return Request({"type": "http", "raw_path": path, "headers": [], "state": state})


async def test_only_addresses_of_a_part_get_their_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faces = faces_of(monkeypatch, OWN, OTHER)
    paths = [b"/own", b"/other", b"/v1/tools", b"/"]
    assert [faces.takes_over(path) for path in paths] == [True, True, False, False]
    assert faces.hand_over(request_of(b"/own"), None) is GIVEN  # of the first part
    assert faces.hand_over(request_of(b"/other"), None) is None


async def test_attack_handover_over_tcp_needs_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(home=tmp_path, tcp="127.0.0.1:8321", tcp_behind_proxy=True)
    async with Engine(config=config, interpreter=FakeWall()) as engine:
        faces = faces_of(monkeypatch, OWN, engine=engine)
        with pytest.raises(EngineError) as refused:
            faces.hand_over(request_of(b"/own", Face.TCP), None)
        twin = faces.hand_over(request_of(b"/own"), None)
    assert isinstance(refused.value, Unauthorized)
    assert twin is GIVEN


async def test_request_to_a_port_is_refused_without_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "parts", lambda: ())
    async with Engine(config=Config(home=tmp_path), interpreter=FakeWall()) as engine:
        assert not module.Faces(engine).takes_over(b"/v1/sessions/s1/ports/80/")
        path = "/v1/sessions/s1/ports/80/"
        answer = await FacesClient(engine).ask("GET", path, face=Face.ENGINE)
    assert (answer.status, answer.body["error"]["code"]) == (404, "RESOURCE_NOT_FOUND")


@pytest.mark.parametrize(
    ("path", "is_port"),
    [
        (b"/v1/sessions/s1/ports/80", True),
        (b"/v1/sessions/s1/ports/80/a%2Fb", True),
        (b"/v1/sessions/s1/ports/123456", False),
        (b"/v1/sessions/s1/ports/", False),
        (b"/v1/sessions/s1/ports/80x", False),
        (b"/v1/sessions/a/b/ports/80", False),
        (b"/v2/sessions/s1/ports/80", False),
        (b"/v1/sessions/s1", False),
    ],
)
async def test_address_of_a_port_is_recognized(path: bytes, is_port: bool) -> None:
    assert is_for_port(path) is is_port
    (own,) = HANDOVERS
    assert own.accepts is is_for_port
