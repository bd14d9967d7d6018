"""Files in a place that a part adds: chosen by the scheme of the URL, or refused with the forms."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar
from urllib.parse import parse_qsl, urlsplit

import pytest
from pydantic import ValidationError

from fumehood import Config, Engine
from fumehood import parts as parts_module
from fumehood.core.part import Part
from fumehood.parts import parts
from fumehood.storage.database import open_database
from fumehood.storage.files import Directory, Found, RemoteFiles

pytestmark = pytest.mark.sqlite


@dataclass(frozen=True)
class Shelf(RemoteFiles):
    """Files in a directory that counts as another machine's, at `shelf:///PATH`."""

    path: Path
    names: re.Pattern[str]
    form: ClassVar = "shelf:///PATH"

    @classmethod
    def is_url(cls, url: str) -> bool:
        return url.startswith("shelf:///")

    @classmethod
    def at(cls, url: str) -> Shelf:
        return cls(Path(url.removeprefix("shelf://")), re.compile(r"[a-z]+\.key"))

    def below(self, folder: str, names: re.Pattern[str]) -> Shelf:
        (self.path / folder).mkdir(exist_ok=True)
        return Shelf(self.path / folder, names)

    def put(self, name: str, source: Path) -> None:
        self.put_bytes(name, source.read_bytes())

    def put_bytes(self, name: str, content: bytes) -> None:
        Directory(self.path).put_bytes(name, content)

    def open(self, name: str, size: int) -> BinaryIO:
        return Directory(self.path).open(name, size)

    def found(self, prefix: str = "") -> dict[str, Found]:
        found = Directory(self.path).found(prefix).items()
        return {name: one for name, one in found if self.names.fullmatch(name)}

    def delete(self, names: Collection[str]) -> None:
        Directory(self.path).delete(names)

    def secret(self, name: str, size: int) -> bytes:
        return Directory(self.path).secret(name, size)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A place of a part's kind, whose part is there."""
    part = Part(name="shelf", files={"shelf": f"{__name__}:Shelf"})
    monkeypatch.setattr(parts_module, "parts", lambda: (part,))
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


@pytest.mark.anyio
async def test_blob_is_kept_in_the_place_that_the_part_adds(shelf: Path, home: Path) -> None:
    """The next engine, with another state directory, reads it there."""
    config = Config(home=home, files={"url": f"shelf://{shelf}"})
    for name in ("one", "two"):
        (home / name).mkdir(mode=0o700)
    with closing(open_database(home / "one" / "state.db")) as database:
        async with Engine(config=config, database=database) as engine:
            draft = engine.blobs.draft(engine.owner.id)
            draft.feed(b"kept")
            blob = await engine.blobs.keep(draft, "a.txt", "text/plain")
    assert (shelf / "blobs" / blob.id).read_bytes() == b"kept"
    assert not any(path.read_bytes() == b"kept" for path in files_below(home))
    for file in ("state.db", "audit.key"):
        (home / "one" / file).rename(home / "two" / file)
    signed = dict(parse_qsl(urlsplit(blob.url).query))
    with closing(open_database(home / "two" / "state.db")) as database:
        async with Engine(config=config, database=database) as engine:
            asked = blob.id, engine.owner.id, signed["expires"], signed["signature"]
            _, file = await engine.blobs.open_blob(*asked)
            with file:
                assert file.read() == b"kept"


def files_below(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if found.is_file()]


@pytest.mark.parametrize("url", ["s3://bucket", "shelf:/x", "shelf2:///x", "x", "", "SHELF:///x"])
@pytest.mark.usefixtures("shelf")
def test_other_url_is_refused_with_the_forms_that_are_there(url: str) -> None:
    with pytest.raises(ValidationError, match=r"path of a directory, or shelf:///PATH \["):
        Config(files={"url": url})
    assert Config(files={"url": "shelf:///x"}).files.remote() is not None  # twin


def test_only_directories_are_known_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "parts", tuple)
    with pytest.raises(ValidationError, match=r"must be the absolute path of a directory \["):
        Config(files={"url": "s3://bucket"})
    assert Config(files={"url": "/srv"}).files.remote() is None


def test_product_has_buckets() -> None:
    added = [scheme for part in parts() for scheme in part.files]
    assert added == ["s3"]
