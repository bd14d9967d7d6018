"""Shorten: both ends stay, the whole is kept, and what is short is left as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood import Config, Engine, tool
from fumehood.core.errors import EndedBy, EngineError, ExecutionError
from fumehood.executors.outcome import CutText, Outcome
from fumehood.pipeline.shape import ShapedOutcome
from fumehood.pipeline.shorten import INLINE_BYTES, head_and_tail, shorten, shortened
from fumehood.protocol import strict_json
from fumehood.protocol.blob_urls import parse_blob_url
from fumehood.storage.blobs import BlobStore
from fumehood.storage.database import open_database
from fumehood.testing import FakeWall, ManualClock

pytestmark = [pytest.mark.anyio, pytest.mark.row("E6")]

OWNER = "uid:1"
LONG = "head " + "x" * 30_000 + " tail"


@pytest.fixture
async def store(home: Path) -> AsyncIterator[BlobStore]:
    database = open_database(None)
    made = BlobStore(database, home, max_bytes=1 << 20, lifetime_s=60, now=ManualClock().now)
    await made.open()
    yield made
    made.close()
    database.close()


async def _short(store: BlobStore, data: Any, **how: Any) -> dict[str, Any]:
    shaped = ShapedOutcome(Outcome(EndedBy.OK, "call", data=data), data, "")
    found = await shorten(shaped, blobs=store, **{"principal_id": OWNER, **how})
    assert found.text in ("", strict_json.dumps(found.data).decode())
    return found.data


async def _whole(store: BlobStore, url: str) -> str:
    link = parse_blob_url(url)
    _, file = await store.open_blob(link.blob_id, OWNER, link.expires, link.signature)
    with file:
        return file.read().decode()


@pytest.mark.parametrize(
    "data",
    [{}, {"a": "x" * INLINE_BYTES}, {"a": "ä" * (INLINE_BYTES // 2)}, {"a": ["x" * 9000] * 5, "b": 1},
     {"value": list(range(10_000))},
     {"filename": "a", "content_base64": "x" * 50_000},
     {"files": [{"filename": "a", "content_base64": "x" * 50_000}]}],
    ids=lambda data: str(data)[:30],
)  # fmt: skip
async def test_what_is_short_enough_and_what_is_no_text_stays(store: BlobStore, data: Any) -> None:
    assert await _short(store, data) == data
    assert store.room.taken == 0


async def test_long_text_keeps_both_ends_and_the_whole_is_behind_an_address(
    store: BlobStore,
) -> None:
    data = await _short(store, {"stdout": LONG, "more": 1})
    assert data["stdout"].startswith("head xxx")
    assert data["stdout"].endswith("xxx tail")
    assert len(data["stdout"]) <= INLINE_BYTES
    assert data["more"] == 1
    assert data["truncated"] is True
    info = data["truncation_info"]
    assert (info["original_length"], info["returned_length"]) == (len(LONG), len(data["stdout"]))
    assert info["summary"] == f"stdout has {len(LONG)} characters, of which both ends are here."
    assert await _whole(store, data["resource_url"]) == LONG
    (field,) = info["fields"]
    assert (field["field"], field["resource_url"]) == ("stdout", data["resource_url"])
    assert field["expires_at"] == "2026-01-01T00:01:00.000Z"


async def test_several_long_texts_have_an_address_each(store: BlobStore) -> None:
    data = await _short(store, {"a": LONG, "b": {"c": ["short", LONG + "!"]}})
    info = data["truncation_info"]
    assert [field["field"] for field in info["fields"]] == ["a", "b.c.1"]
    assert data["b"]["c"][0] == "short"
    assert data["b"]["c"][1].endswith("tail!")
    assert info["original_length"] == 2 * len(LONG) + 1
    assert data["resource_url"] == info["fields"][0]["resource_url"]
    assert await _whole(store, info["fields"][1]["resource_url"]) == LONG + "!"


@pytest.mark.row("S7")
async def test_long_value_of_code_is_left_out_whole(store: BlobStore) -> None:
    value = list(range(10_000))
    data = await _short(store, {"value": value, "value_repr": "[…]"}, with_value=True)
    assert (data["value"], data["value_repr"]) == (None, "[…]")
    assert strict_json.loads((await _whole(store, data["resource_url"])).encode()) == value
    assert data["truncation_info"]["fields"][0]["returned_length"] == 0
    short = {"value": [1]}
    assert await _short(store, short, with_value=True) == short


async def test_details_of_an_error_are_shortened_the_same_way(store: BlobStore) -> None:
    error: EngineError = ExecutionError("No.", details={"stdout": LONG})
    shaped = ShapedOutcome(Outcome(EndedBy.EXCEPTION, "call", error=error), {}, "")
    found = await shorten(shaped, blobs=store, principal_id=OWNER)
    assert found.details is not None
    assert found.details["truncated"] is True
    assert await _whole(store, found.details["resource_url"]) == LONG
    assert error.details == {"stdout": LONG}
    assert found.data == {}


async def test_summary_can_be_declined(store: BlobStore) -> None:
    data = await _short(store, {"a": LONG}, with_summary=False)
    assert data["truncation_info"]["summary"] is None


async def test_what_cannot_be_kept_says_so_and_the_ends_stay(store: BlobStore) -> None:
    data = await _short(store, {"a": LONG * 20})
    assert "resource_url" not in data
    assert "your share" in data["truncation_info"]["fields"][0]["not_kept"]
    assert data["a"].startswith("head")


async def test_nobodys_answer_is_shortened_and_nothing_kept(store: BlobStore) -> None:
    data = await _short(store, {"a": LONG}, principal_id=None)
    assert data["truncated"] is True
    assert "resource_url" not in data
    assert store.room.taken == 0


@given(st.text("ä😀x\n€", min_size=1, max_size=12), st.text(max_size=3))
def test_ends_are_ends_and_fit_whatever_the_characters(part: str, start: str) -> None:
    text = start + part * (INLINE_BYTES // len(part.encode()) + 1)
    shown = head_and_tail(text)
    head, rest = shown.split("\n… ", 1)
    missing, tail = rest.split(" characters left out …\n", 1)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(missing) + len(tail) == len(text)
    assert len(shown.encode("utf-8", "replace")) <= INLINE_BYTES


def test_shortened_for_whoever_has_the_whole() -> None:
    assert shortened({"a": "x", "b": {"c": LONG}})["b"]["c"].endswith("tail")
    short = {"a": "x"}
    assert shortened(short) is short


@tool(sandboxed=False)
async def talk(n: int) -> dict[str, Any]:
    """Say much.

    Args:
        n: How much.
    """
    return {"text": "w" * n}


@pytest.mark.row("D1")
async def test_any_tool_of_an_embedded_engine_is_shortened_and_the_whole_is_there(
    home: Path,
) -> None:
    async with Engine(tools=[talk], config=Config(home=home), interpreter=FakeWall()) as engine:
        envelope = await engine.call("talk", {"n": 50_000})
        assert envelope.data["truncated"] is True
        assert await engine.blob(envelope.data["resource_url"]) == b"w" * 50_000
        assert envelope.metadata.usage.output_tokens < 4000
        with pytest.raises(ValueError, match="no address"):
            await engine.blob("/v1/health")
        quiet = await engine.call("talk", {"n": 50_000}, return_summary=False)
        assert quiet.data["truncation_info"]["summary"] is None
        short = await engine.call("talk", {"n": 10})
        assert short.data == {"text": "w" * 10}


@pytest.mark.row("S8")
@pytest.mark.parametrize("link", [{"resource_url": "/v1/blobs/x"}, {"not_kept": "no room"}])
async def test_text_that_was_cut_before_is_shown_like_any_other(
    store: BlobStore, link: dict[str, Any]
) -> None:
    """Twin of a long text: the same note, but nothing is kept a second time."""
    data = {"stdout": "", "other": "x" * 20_000}
    cut = CutText("stdout", "h" * 9000, "t" * 9000, 10**9, link)
    shaped = ShapedOutcome(Outcome(EndedBy.OK, "call", data=data, cuts=(cut,)), data, "")
    short = (await shorten(shaped, blobs=store, principal_id=OWNER)).data
    missing = 10**9 - 2 * 5000
    assert short["stdout"] == f"{'h' * 5000}\n… {missing} characters left out …\n{'t' * 5000}"
    first, second = short["truncation_info"]["fields"]
    assert (first["field"], first["original_length"]) == ("stdout", 10**9)
    assert first.items() >= link.items()
    assert second["field"] == "other"
    assert short["truncation_info"]["original_length"] == 10**9 + 20_000
    assert short["resource_url"] == link.get("resource_url", second["resource_url"])
    assert store.room.taken == 20_000
