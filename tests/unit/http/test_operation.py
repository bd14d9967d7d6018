"""The document follows from the operations: parameters, bodies, codes, who may ask."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.answers import Deleted
from fumehood.core.call import CallBody
from fumehood.core.errors import RateLimited
from fumehood.core.tool import ToolType
from fumehood.http.operation import Needs, Operation, make_document
from fumehood.http.routes import tools
from support.openapi import faults_of


class Query(BaseModel):
    """What a list can be asked for."""

    type: ToolType | None = None
    limit: int = Field(default=10, ge=1, le=100)
    since: str


async def look_up_thing(request: Request) -> Response:
    """Look a thing up.

    More of it is said here.
    """
    return JSONResponse({})


def described(**fields: Any) -> dict[str, Any]:
    """The one operation of a document, which is sound."""
    operation = Operation(
        **{"method": "GET", "path": "/v1/x", "endpoint": look_up_thing, "needs": Needs.CALLER}
        | fields
    )
    document = make_document("title", "1.2.3", [operation])
    assert faults_of(document) == []
    (entry,) = document["paths"][operation.path].values()
    return entry | {"document": document}


def test_names_and_words_are_those_of_the_function() -> None:
    entry = described()
    assert entry["operationId"] == "lookUpThing"
    assert entry["summary"] == "Look a thing up."
    assert entry["description"] == "More of it is said here."


def test_query_is_described_by_the_model_that_reads_it() -> None:
    entry = described(query=Query)
    found = {parameter["name"]: parameter for parameter in entry["parameters"]}
    assert {name: p["required"] for name, p in found.items()} == {
        "type": False, "limit": False, "since": True,
    }  # fmt: skip
    assert found["limit"]["schema"]["maximum"] == 100
    assert "ToolType" in entry["document"]["components"]["schemas"]
    assert "400" in entry["responses"]


def test_body_brings_the_codes_of_reading_it() -> None:
    assert {"400", "413", "415"} <= set(described(method="POST", body=CallBody)["responses"])
    assert not {"400", "413", "415"} & set(described()["responses"])


def test_who_may_ask_is_said_and_brings_its_codes() -> None:
    assert described(needs=Needs.ADMIN)["security"] == [{"bearer": []}]
    assert described(needs=Needs.CALLER)["security"] == [{}, {"bearer": []}]
    nobody = described(needs=Needs.NOBODY)
    assert nobody["security"] == []
    assert not {"401", "403"} & set(nobody["responses"])
    assert {"401", "403"} <= set(described()["responses"])


def test_own_errors_stand_under_their_status() -> None:
    entry = described(errors=frozenset({RateLimited}), has_tool_codes=True, data=Deleted)
    assert entry["responses"]["429"]["description"] == "RATE_LIMITED"
    assert "422" in entry["responses"]
    assert "422" not in described()["responses"]


def test_plain_answer_is_no_envelope() -> None:
    entry = described(plain=(200, 503), data=Deleted)
    for status in ("200", "503"):
        schema = entry["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/Deleted"}


def test_query_of_the_tools_is_described_as_it_is_read() -> None:
    assert set(tools.ToolQuery.model_fields) == {*tools.PARAMETERS, *tools.AGENT_PARAMETERS}
