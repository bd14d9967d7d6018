"""Rooms of files: what their threads fail at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from fumehood.storage.errors import FilesAway
from fumehood.storage.file_room import FileRoom

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def fail(*_: Any) -> NoReturn:
    raise KeyError("a bug")


@pytest.mark.parametrize(
    ("error", "reported"),
    [(KeyError("a bug"), True), (FilesAway("gone"), False), (FileNotFoundError(), False)],
)
async def test_bug_while_a_file_is_copied_is_reported_but_not_that_the_bucket_is_away(
    tmp_path: Path, error: Exception, reported: bool
) -> None:
    def work(room: FileRoom) -> None:
        room.copy("a")

    bucket = Mock(put=Mock(side_effect=error))
    assert len(await errors_of(work, tmp_path, bucket)) == reported
    bucket.put.assert_called_once_with("a", tmp_path / "rooms" / "a")


@pytest.mark.parametrize(
    "work",
    [
        lambda room: room.submit(fail),
        lambda room: room.queue("ann", 1, fail, b"x"),
    ],
    ids=["submitted", "queued"],
)
async def test_bug_in_the_rooms_thread_is_reported(
    tmp_path: Path, work: Callable[[FileRoom], Any]
) -> None:
    (error,) = await errors_of(work, tmp_path)
    assert error == "A thread of rooms failed: KeyError in fail"


async def errors_of(work: Callable[[FileRoom], Any], state: Path, place: Any = None) -> list[str]:
    """What the event loop reports after some work, which has ended."""
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, told: seen.append(told["message"]))
    room = FileRoom(state, "rooms", 1 << 20, lambda name: None, remote=place)
    room.prepare()
    room.open()
    work(room)
    await asyncio.to_thread(room.close)
    await asyncio.sleep(0)
    return seen
