"""File operations of a session's owner, on an ordinary directory in the workspace's place."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fumehood.guest.container import files

TOKEN = "0123456789abcdef" * 2

Do = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.row("S6")


@pytest.fixture
def do(place: Path) -> Do:
    def do(verb: str, **arguments: Any) -> dict[str, Any]:
        if "content" in arguments:
            arguments["content_base64"] = base64.b64encode(arguments.pop("content")).decode()
        exit_code, claim = files.run({"do": verb, **arguments})
        assert exit_code == 0
        result: dict[str, Any] = claim["result"]
        return result

    return do


def fault(result: dict[str, Any]) -> str:
    kind: str = result["fault"]["kind"]
    return kind


def listed(do: Do, **arguments: Any) -> list[str]:
    asked = {"path": "", "recursive": True, "most": 1000} | arguments
    return [entry["path"] for entry in do("list", **asked)["entries"]]


def test_written_file_is_read_and_listed(do: Do, place: Path) -> None:
    content = bytes(range(256)) * 4
    assert do("write", path="d/e/f.bin", mode="create", content=content) == {"size": 1024}
    read = do("read", path="d/e/f.bin", offset=1000, length=100)
    assert base64.b64decode(read["content_base64"]) == content[1000:]
    assert read["size"] == 1024
    entries = do("list", path="", recursive=True, most=10)["entries"]
    assert [(entry["path"], entry["kind"], entry["size"]) for entry in entries] == [
        ("d", "directory", 0), ("d/e", "directory", 0), ("d/e/f.bin", "file", 1024),
    ]  # fmt: skip
    assert listed(do, recursive=False) == ["d"]
    assert listed(do, path="d/e/f.bin") == ["d/e/f.bin"]


def test_file_version_changes_with_the_content(do: Do, place: Path) -> None:
    do("write", path="f", mode="create", content=b"one")
    first = do("read", path="f", offset=0, length=1)["version"]
    assert do("read", path="f", offset=1, length=1)["version"] == first
    do("write", path="f", mode="replace", content=b"two")
    assert do("read", path="f", offset=0, length=1)["version"] != first


def test_create_replace_and_append_modes_write_as_documented(do: Do, place: Path) -> None:
    do("write", path="f", mode="create", content=b"one")
    assert fault(do("write", path="f", mode="create", content=b"two")) == "exists"
    assert do("write", path="f", mode="append", content=b"+") == {"size": 4}
    assert (place / "f").read_bytes() == b"one+"
    assert do("write", path="f", mode="replace", content=b"") == {"size": 0}
    assert do("write", path="new", mode="append", content=b"x") == {"size": 1}
    assert sorted(os.listdir(place)) == ["f", "new"]


def test_upload_in_pieces_is_visible_only_when_complete(do: Do, place: Path) -> None:
    assert do("put", token=TOKEN, offset=0, content=b"abc") == {"size": 3}
    assert do("put", token=TOKEN, offset=3, content=b"def") == {"size": 6}
    assert listed(do) == []
    assert do("finish", token=TOKEN, path="d/whole", size=6, mode="create") == {"size": 6}
    assert listed(do) == ["d", "d/whole"]
    assert (place / "d/whole").read_bytes() == b"abcdef"


def test_inconsistent_upload_is_refused_and_leaves_no_file(do: Do, place: Path) -> None:
    do("put", token=TOKEN, offset=0, content=b"abc")
    assert fault(do("put", token=TOKEN, offset=2, content=b"x")) == "changed"
    assert fault(do("finish", token=TOKEN, path="f", size=9, mode="create")) == "changed"
    assert os.listdir(place) == []
    do("put", token=TOKEN, offset=0, content=b"abc")
    assert do("drop", token=TOKEN) == {}
    assert os.listdir(place) == []
    assert fault(do("put", token="../../etc", offset=0, content=b"x")) == "invalid"


def test_deletion_lists_deleted_and_missing_paths(do: Do, place: Path) -> None:
    do("write", path="d/f", mode="create", content=b"")
    do("write", path="g", mode="create", content=b"")
    once = do("delete", paths=["g", "d", "missing"], recursive=False)
    assert (once["deleted"], once["missing"]) == (["g"], ["missing"])
    assert [failed["path"] for failed in once["failed"]] == ["d"]
    assert do("delete", paths=["d"], recursive=True)["deleted"] == ["d"]
    assert os.listdir(place) == []


def test_symbolic_links_are_listed_and_never_followed(do: Do, place: Path, outside: Path) -> None:
    (place / "file").symlink_to(outside / "secret")
    (place / "dir").symlink_to(outside)
    assert fault(do("read", path="file", offset=0, length=9)) == "link"
    assert fault(do("read", path="dir/secret", offset=0, length=9)) == "link"
    assert fault(do("write", path="file", mode="replace", content=b"x")) == "link"
    assert fault(do("write", path="file", mode="append", content=b"x")) == "link"
    assert fault(do("write", path="dir/new", mode="create", content=b"x")) == "link"
    assert listed(do, path="dir") == ["dir"]
    assert do("delete", paths=["file", "dir"], recursive=True)["deleted"] == ["file", "dir"]
    assert (outside / "secret").read_text() == "secret"
    assert os.listdir(place) == []


def test_reading_a_pipe_is_refused_without_waiting(do: Do, place: Path) -> None:
    os.mkfifo(place / "pipe")
    assert fault(do("read", path="pipe", offset=0, length=9)) == "not_a_file"
    assert fault(do("write", path="pipe", mode="append", content=b"x")) == "not_a_file"
    assert fault(do("write", path="pipe", mode="replace", content=b"x")) == "not_a_file"
    (place / "d").mkdir()
    assert fault(do("read", path="d", offset=0, length=9)) == "not_a_file"
    (entry,) = do("list", path="pipe", recursive=False, most=9)["entries"]
    assert entry["kind"] == "other"


def test_long_file_list_is_paged(do: Do, place: Path) -> None:
    for number in range(25):
        (place / f"{number:03}").touch()
    first = do("list", path="", recursive=False, most=10)
    assert first["has_more"] is True
    second = do("list", path="", recursive=False, most=100, after=first["entries"][-1]["path"])
    assert second["has_more"] is False
    names = [entry["path"] for entry in first["entries"] + second["entries"]]
    assert names == [f"{number:03}" for number in range(25)]


def test_missing_file_has_a_clear_message(do: Do, place: Path) -> None:
    missing = do("read", path="no/such", offset=0, length=1)
    assert fault(missing) == "not_found"
    assert "no/such" in missing["fault"]["message"]
    assert str(place) not in missing["fault"]["message"]


# -- archives -----------------------------------------------------------------------------


def archive(*members: tuple[str, bytes | str], **more: Any) -> bytes:
    """A tar of members: a name with a content, or with the name of its type."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, what in members:
            member = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
            else:
                member.type = getattr(tarfile, what)
                member.linkname = "/etc/passwd"
                tar.addfile(member)
    return file.getvalue()


def unpack(do: Do, content: bytes, path: str = "") -> dict[str, Any]:
    do("put", token=TOKEN, offset=0, content=content)
    return do("unpack", token=TOKEN, path=path, size=len(content))


def test_archive_is_unpacked_over_what_is_there(do: Do, place: Path) -> None:
    (place / "d").mkdir()
    (place / "d/old").write_text("stays")
    (place / "d/a").write_text("replaced")
    content = archive(("./", "DIRTYPE"), ("./a", b"new"), ("e/f/g", b""), ("empty/", "DIRTYPE"))
    assert unpack(do, content, "d") == {"files": 2, "size": 3}
    assert listed(do) == ["d", "d/a", "d/e", "d/e/f", "d/e/f/g", "d/empty", "d/old"]
    assert (place / "d/a").read_text() == "new"
    assert os.listdir(place) == ["d"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("/etc/x", b""), ("../x", b""), ("a/../../x", b""), ("a//b", b""), ("a/./b", b""),
        ("..", "DIRTYPE"), ("link", "SYMTYPE"), ("hard", "LNKTYPE"), ("pipe", "FIFOTYPE"),
        ("disk", "BLKTYPE"), ("tty", "CHRTYPE"), ("sparse", "GNUTYPE_SPARSE"),
        ("/".join("d" * 66), b""),
    ],
)  # fmt: skip
def test_archive_with_anything_but_plain_members_is_refused_before_a_write(
    do: Do, place: Path, name: str, what: bytes | str
) -> None:
    result = unpack(do, archive(("first", b"1"), (name, what)))
    assert (fault(result), listed(do)) == ("archive", [])
    assert os.listdir(place) == []


def test_what_is_no_archive_is_refused_and_removed(do: Do, place: Path) -> None:
    whole = archive(("a", b"x" * 1000), ("b", b"y" * 1000))
    for content in (b"", b"no archive at all" * 100, whole[:700], whole[:1900], b"\x1f\x8b" * 512):
        assert fault(unpack(do, content)) == "archive", content[:20]
        assert os.listdir(place) == []


def altered(field: slice, value: bytes) -> bytes:
    """An archive whose header has another field, and the right checksum."""
    header = bytearray(archive(("a", b"x"))[:512])
    header[field] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(2048)


@pytest.mark.parametrize(
    "content",
    [
        altered(slice(124, 136), b"\x80" + b"\x7f" * 11),
        altered(slice(124, 136), b"\xff" * 12),
        tarfile.TarInfo("L" * 300).tobuf(tarfile.GNU_FORMAT)[:1024] * 3000,
        archive(("d/", "DIRTYPE"), ("d", b"")),
        archive(("e", b""), ("e/", "DIRTYPE")),
        archive(("e/f", b""), ("e", b"")),
        archive((".fumehood-upload-" + "a" * 32, b"")),
    ],
    ids=["huge", "negative", "chain", "directory-file", "file-directory", "below", "upload"],
)
def test_broken_or_contradictory_archive_is_refused_before_a_write(
    do: Do, place: Path, content: bytes
) -> None:
    assert fault(unpack(do, content)) == "archive"
    assert os.listdir(place) == []


def test_files_that_nobody_can_name_or_reach_do_not_break_a_listing(do: Do, place: Path) -> None:
    inner = os.open(place, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("e" * 250, dir_fd=inner)
        outer, inner = inner, os.open("e" * 250, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    (place / "old").write_text("x")
    os.utime(place / "old", ns=(0, -(1 << 62)))
    paths = listed(do)
    assert max(map(len, paths)) <= 4096
    assert paths[-1] == "old"


def test_closed_file_is_read_with_others_and_stays_closed(do: Do, place: Path) -> None:
    (place / "closed").write_text("x")
    (place / "closed").chmod(0)
    (piece,) = do("read_many", paths=["closed"], length=10)["pieces"]
    assert base64.b64decode(piece["content_base64"]) == b"x"
    assert (place / "closed").stat().st_mode & 0o777 == 0


def test_number_of_members_is_limited(do: Do, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_MEMBERS", 3)
    four = [(str(n), b"") for n in range(4)]
    assert fault(unpack(do, archive(*four))) == "archive"
    assert unpack(do, archive(*four[:3])) == {"files": 3, "size": 0}


def test_archive_does_not_follow_links_of_the_workspace(
    do: Do, place: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (place / "out").symlink_to(outside)
    (place / "file").symlink_to(outside / "file")
    for name in ("out/x", "file"):
        assert fault(unpack(do, archive((name, b"x")))) == "link"
    assert fault(unpack(do, archive(("x", b"x")), "out")) == "link"
    assert os.listdir(outside) == []


def test_files_are_read_together_as_far_as_they_fit(do: Do, place: Path) -> None:
    for name in "abc":
        (place / name).write_bytes(name.encode() * 10)
    (place / "b").chmod(0o755)
    (place / "link").symlink_to("a")
    asked = ["a", "link", "b", "c"]
    pieces = do("read_many", paths=asked, length=25)["pieces"]
    contents = [
        one and (base64.b64decode(one["content_base64"]), one["executable"]) for one in pieces
    ]
    assert contents == [(b"a" * 10, False), None, (b"b" * 10, True)]
    assert do("read_many", paths=["a"], length=9)["pieces"] == []
