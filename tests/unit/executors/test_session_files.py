"""Files of a session outside of calls: in pieces, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.errors import EngineError, InvalidParams, RequestTooLarge, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.executors.session_files import Download, FileChanged, SessionFiles
from fumehood.protocol.cursors import Cursors
from support.fake_files import UPLOAD, FakeFiles

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6")]

ANN = Principal("ann")


class Keeper:
    """One session of 128 MB, whose turns are taken one after the other."""

    def __init__(self, lease: Any) -> None:
        self.lease = lease
        self.turns = 0

    def find(self, principal: Principal, session_id: str) -> Any:
        assert (principal, session_id) == (ANN, "sess_1")
        return type("Record", (), {"memory_mb": 128})

    async def files(self, principal: Principal, session_id: str) -> Any:
        @asynccontextmanager
        async def turn() -> AsyncIterator[Any]:
            self.turns += 1
            yield self.lease

        return turn()


@pytest.fixture
def fake(tmp_path: Path) -> FakeFiles:
    return FakeFiles(tmp_path, room=40 * MB)


def files_of(lease: Any) -> SessionFiles:
    keeper: Any = Keeper(lease)
    return SessionFiles(keeper, Cursors(b"k" * 32), ANN, "sess_1")


def left_over(fake: FakeFiles) -> list[str]:
    return [name for name in os.listdir(fake.root) if name.startswith(UPLOAD)]


@pytest.mark.parametrize("size", [0, 1, MB - 1, MB, MB + 1, 3 * MB + 7])
async def test_file_comes_back_as_it_went(fake: FakeFiles, size: int) -> None:
    content = os.urandom(size)
    files = files_of(fake)
    assert await files.write("d/a.bin", content) == size
    assert (fake.root / "d/a.bin").read_bytes() == content
    assert await files.read("d/a.bin") == content
    sizes = [len(r["content_base64"]) for r in fake.requests if r["do"] == "put"]
    assert max(sizes) <= MB * 4 // 3 + 4
    assert left_over(fake) == []


async def test_each_piece_has_a_turn_of_its_own(fake: FakeFiles) -> None:
    """A call in the session need not wait for a client."""
    keeper: Any = Keeper(fake)
    files = SessionFiles(keeper, Cursors(b"k" * 32), ANN, "sess_1")
    await files.write("a", b"x" * (2 * MB + 1))
    assert keeper.turns == 4  # three pieces and the end


async def test_upload_that_is_left_unfinished_leaves_nothing(fake: FakeFiles) -> None:
    async with files_of(fake).upload("a") as upload:
        await upload.feed(b"x" * MB)
        assert len(left_over(fake)) == 1
    assert os.listdir(fake.root) == []


async def megabytes(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * MB


async def test_file_that_no_workspace_holds_is_refused_before_it_is_sent(fake: FakeFiles) -> None:
    files = files_of(fake)
    with pytest.raises(RequestTooLarge, match="32 MB"):
        await files.write("a", megabytes(40))
    assert len([r for r in fake.requests if r["do"] == "put"]) == 32
    assert os.listdir(fake.root) == []
    assert await files.write("a", b"x" * 32 * MB) == 32 * MB  # the twin


async def test_full_workspace_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    fake = FakeFiles(tmp_path, room=MB)
    with pytest.raises(InvalidParams, match="is full"):
        await files_of(fake).write("a", b"x" * 2 * MB)
    assert os.listdir(fake.root) == []


async def test_file_is_created_only_where_there_is_none(fake: FakeFiles) -> None:
    files = files_of(fake)
    await files.write("a", b"1", "create")
    with pytest.raises(InvalidParams, match="already"):
        await files.write("a", b"2", "create")
    assert await files.read("a") == b"1"
    assert left_over(fake) == []
    await files.write("a", b"3")
    assert await files.read("a") == b"3"


async def taken(download: Download, between: Callable[[], object], got: list[bytes]) -> None:
    async for piece in download.pieces():
        got.append(piece)
        between()


async def test_file_that_changes_meanwhile_ends_short(fake: FakeFiles) -> None:
    file = fake.root / "a"
    file.write_bytes(b"1" * MB)
    download = await files_of(fake).download("a")
    got: list[bytes] = []
    with pytest.raises(FileChanged):
        await taken(download, lambda: file.write_bytes(b"2" * MB), got)
    assert set(b"".join(got)) == {ord("1")}
    assert len(b"".join(got)) < download.size


async def test_file_that_goes_meanwhile_ends_short(fake: FakeFiles) -> None:
    file = fake.root / "a"
    file.write_bytes(b"1" * MB)
    download = await files_of(fake).download("a")
    with pytest.raises(FileChanged):
        await taken(download, lambda: file.unlink(missing_ok=True), [])


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/..", "a//b", "a\0", "x" * 256])
async def test_path_that_leads_anywhere_else_reaches_no_guest(fake: FakeFiles, path: str) -> None:
    files = files_of(fake)
    with pytest.raises(InvalidParams):
        await files.read(path)
    with pytest.raises(InvalidParams):
        await files.write(path, b"")
    with pytest.raises(InvalidParams):
        await files.delete(path)
    if path:
        with pytest.raises(InvalidParams):
            await files.page(path)
    assert fake.requests == []


async def test_delete_says_what_it_did_not_do(fake: FakeFiles) -> None:
    files = files_of(fake)
    (fake.root / "d").mkdir()
    (fake.root / "d/a").write_bytes(b"")
    with pytest.raises(InvalidParams, match="recursive=true"):
        await files.delete("d")
    with pytest.raises(ResourceNotFound):
        await files.delete("e")
    await files.delete("d", recursive=True)
    assert os.listdir(fake.root) == []


class Lies(FakeFiles):
    """A guest that has another answer for one verb."""

    def __init__(self, root: Path, verb: str, said: JsonObject) -> None:
        super().__init__(root)
        self.verb = verb
        self.said = said

    def answer(self, request: JsonObject) -> JsonObject:
        return self.said if request["do"] == self.verb else super().answer(request)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("put", {"size": 2}),
        ("put", {}),
        ("finish", {"size": 2}),
        ("read", {"content_base64": "", "size": 1, "version": ""}),
        ("read", {"content_base64": "YWJj", "size": 1, "version": ""}),
        ("delete", {"deleted": ["b"], "missing": [], "failed": []}),
    ],
)
async def test_guest_that_lies_is_not_believed(tmp_path: Path, verb: str, said: JsonObject) -> None:
    files = files_of(Lies(tmp_path, verb, said))
    ask: dict[str, Callable[[], Any]] = {
        "read": lambda: files.read("a"),
        "delete": lambda: files.delete("a"),
    }
    with pytest.raises(EngineError, match="invalid answer"):
        await ask.get(verb, lambda: files.write("a", b"x"))()
