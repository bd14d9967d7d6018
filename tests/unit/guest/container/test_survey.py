"""Surveys: what a write or a deletion would come to, on an ordinary directory."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.guest.container import files, survey, walk
from fumehood.protocol.framing import MAX_DIRECTORY_DEPTH

pytestmark = pytest.mark.row("A2")

Request = dict[str, Any]


def do(request: Request) -> dict[str, Any]:
    exit_code, claim = files.run(request)
    assert exit_code == 0
    result: dict[str, Any] = claim["result"]
    return result


def look(request: Request) -> dict[str, Any]:
    told = do({"do": "survey", "of": request, "most": 1000})
    assert "fault" not in told, told
    asked = request.get("paths") or [request["path"]]
    return {**told, "faults": dict(zip(asked, told["faults"], strict=True))}


def writing(path: str, mode: str = "create", content: bytes = b"new") -> Request:
    encoded = base64.b64encode(content).decode()
    return {"do": "write", "path": path, "mode": mode, "content_base64": encoded}


def deleting(*paths: str, recursive: bool = True) -> Request:
    return {"do": "delete", "paths": list(paths), "recursive": recursive}


def entries(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry.pop("path"): entry for entry in told["entries"]}


def outcomes(told: dict[str, Any]) -> dict[str, str | None]:
    faults: dict[str, str | None] = told["faults"]
    return faults


def snapshot(place: Path) -> list[tuple[Any, ...]]:
    """Everything below, with what a change would change."""
    found = []
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found.append((str(path), status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content))
    return found


def some_of_everything(place: Path) -> None:
    (place / "d/e").mkdir(parents=True)
    (place / "d/e/f").write_text("text")
    (place / "d/e/f").chmod(0o640)
    (place / "d/link").symlink_to("/etc")
    os.mkfifo(place / "d/pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place / "d/socket"))
    (place / "d/.fumehood-upload-hidden").write_text("x")
    (Path(os.fsdecode(bytes(place / "d") + b"/\xff"))).write_text("")
    (place / "g").write_text("other")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_deletion_survey_lists_everything_to_be_deleted(place: Path) -> None:
    some_of_everything(place)
    before = snapshot(place)
    told = look(deleting("d"))
    assert snapshot(place) == before
    assert (told["has_more"], outcomes(told), told["count"]) == (False, {"d": None}, 8)
    assert told["size"] == 5
    found = entries(told)
    assert [*found] == [
        "d", "d/.fumehood-upload-hidden", "d/e", "d/e/f", "d/link", "d/pipe", "d/socket", "d/\\xff",
    ]  # fmt: skip
    assert found["d/e/f"] == {
        "kind": "file", "mode": 0o640, "size": 4, "links": 1, "sha256": sha256(b"text"),
    }  # fmt: skip
    assert found["d/link"] == {"kind": "link", "mode": 0o777, "target": "/etc"}
    assert (found["d/pipe"]["special"], found["d/socket"]["special"]) == ("pipe", "socket")
    assert base64.b64decode(found["d/\\xff"]["path_base64"]) == b"d/\xff"


@dataclass(frozen=True)
class Change:
    """What happens to a workspace between the look and the deed."""

    name: str
    make: Callable[[Path], Any]

    def __str__(self) -> str:
        return self.name


def replace_by_directory(place: Path) -> None:
    (place / "d/f").unlink()
    (place / "d/f").mkdir()


def replace_by_link(place: Path) -> None:
    (place / "d/f").unlink()
    (place / "d/f").symlink_to("/etc/passwd")


def same_size_and_times(place: Path) -> None:
    """What a look at size and times would not find."""
    status = (place / "d/f").stat()
    (place / "d/f").write_text("txet")
    os.utime(place / "d/f", ns=(status.st_atime_ns, status.st_mtime_ns))


def swap_parent(place: Path) -> None:
    (place / "d").rename(place / "was")
    (place / "d").symlink_to("was")


CHANGES = [
    Change("content", lambda place: (place / "d/f").write_text("longer text")),
    Change("content-of-the-same-size-and-time", same_size_and_times),
    Change("mode", lambda place: (place / "d/f").chmod(0o755)),
    Change("mode-of-a-directory-above", lambda place: (place / "d").chmod(0o700)),
    Change("second-name", lambda place: os.link(place / "d/f", place / "other")),
    Change("gone", lambda place: (place / "d/f").unlink()),
    Change("a-directory-now", replace_by_directory),
    Change("a-link-now", replace_by_link),
    Change("a-link-above-now", swap_parent),
    Change("one-more", lambda place: (place / "d/new").write_text("")),
    Change("one-more-hidden", lambda place: (place / "d/.fumehood-upload-x").write_text("")),
    Change("one-more-without-a-text-name",
           lambda place: open(bytes(place / "d") + b"/\xff", "wb").close()),
    Change("one-more-below", lambda place: (place / "d/e/new").mkdir()),
    Change("link-led-elsewhere",
           lambda place: ((place / "d/l").unlink(), (place / "d/l").symlink_to("g"))),
]  # fmt: skip


@pytest.fixture
def tree(place: Path) -> Path:
    (place / "d/e").mkdir(parents=True)
    (place / "d/f").write_text("text")
    (place / "d/l").symlink_to("f")
    (place / "other-file").write_text("1")
    return place


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_deletion_after_a_change_is_refused_and_changes_nothing(tree: Path, change: Change) -> None:
    request = deleting("d")
    expected = look(request)["base"]
    change.make(tree)
    before = snapshot(tree)
    assert do({**request, "expected": expected})["fault"]["kind"] == "not_as_seen"
    assert snapshot(tree) == before


def test_new_file_at_a_surveyed_path_is_not_overwritten(place: Path) -> None:
    for mode in ("create", "replace", "append"):
        request = writing("d/f", mode)
        expected = look(request)["base"]
        (place / "d").mkdir()
        assert do({**request, "expected": expected})["fault"]["kind"] == "not_as_seen"
        (place / "d").rmdir()


def test_directory_that_cannot_be_surveyed_whole_is_not_deleted(place: Path) -> None:
    deep = "/".join("d" * (MAX_DIRECTORY_DEPTH + 1))
    (place / deep).mkdir(parents=True)
    (place / "f").write_text("")
    request = deleting("d", "f")
    told = look(request)
    assert outcomes(told) == {"d": "unseen", "f": None}
    done = do({**request, "expected": told["base"]})
    assert (done["deleted"], [one["path"] for one in done["failed"]]) == (["f"], ["d"])
    assert (place / deep).exists()
    shutil.rmtree(place / deep)
    assert outcomes(look(deleting("d"))) == {"d": None}  # the twin, one step less


def test_unreadable_directory_is_not_deleted_and_unreadable_file_has_a_version(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a program's user without the right; whoever runs the tests may have it."""
    (place / "d/shut").mkdir(parents=True)
    (place / "d/shut/x").write_text("")
    (place / "f").write_text("text")
    real = os.open

    def refusing(path: Any, *arguments: Any, **more: Any) -> int:
        if path in ("shut", "f"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refusing)
    request = deleting("d", "f")
    told = look(request)
    assert outcomes(told) == {"d": "unseen", "f": None}
    assert "version" in entries(told)["f"]
    assert outcomes(look(deleting("d/shut", recursive=False))) == {"d/shut": "unseen"}
    assert outcomes(look(writing("d/shut/new"))) == {"d/shut/new": "no_right"}
    assert outcomes(look(writing("f", "append"))) == {"f": "unseen"}
    assert outcomes(look(writing("f", "replace"))) == {"f": None}
    done = do({**request, "expected": told["base"]})
    assert (done["deleted"], [one["path"] for one in done["failed"]]) == (["f"], ["d"])
    assert (place / "d/shut/x").exists()


def test_long_survey_is_cut_but_fully_hashed(place: Path) -> None:
    (place / "d").mkdir()
    for number in range(1050):
        (place / f"d/{number:05}").write_text("")
    told = look(deleting("d"))
    assert (told["has_more"], len(told["entries"])) == (True, 1000)
    assert told["count"] == 1051
    (place / "d/01049").write_text("changed")
    assert look(deleting("d"))["base"] != told["base"]


def test_survey_with_long_names_fits_its_answer(place: Path) -> None:
    (place / "d").mkdir()
    for number in range(500):
        (place / "d" / f"{number:03}{chr(0x202E) * 80}").write_text("")
    told = look(deleting("d"))
    assert told["has_more"]
    assert len(str(told).encode()) < 400 * 1024


def test_files_over_the_hash_limit_are_identified_by_version(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "MAX_HASHED_BYTES", 10)
    (place / "small").write_text("x" * 10)
    (place / "zlarge").write_text("x" * 11)
    request = deleting("small", "zlarge")
    told = look(request)
    found = entries(told)
    assert "sha256" in found["small"]
    assert "version" in found["zlarge"]
    os.utime(place / "zlarge", ns=(1, 1))
    assert do({**request, "expected": told["base"]})["fault"]["kind"] == "not_as_seen"


@pytest.mark.parametrize(
    "path", ["..", "../outside", "a/../../outside", "/etc/passwd", "a//b", "."]
)
def test_survey_never_leaves_the_workspace(place: Path, path: str) -> None:
    (place.parent / "outside").write_text("secret")
    (place / "a").mkdir()
    for request in (deleting(path), writing(path), writing(path, "append")):
        told = look(request)
        assert outcomes(told) == {path: "invalid"}
        assert sha256(b"secret") not in str(told)


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
KINDS = st.sampled_from(["file", "directory", "link", "pipe"])


def make(place: Path, path: str, kind: str) -> None:
    """As far as that can be, with what is there already."""
    target = place / path
    if os.path.lexists(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            target.write_text(path)
        elif kind == "directory":
            target.mkdir()
        elif kind == "link":
            target.symlink_to("a")
        else:
            os.mkfifo(target)
    except OSError:
        pass


@pytest.fixture(scope="module")
def ground() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "workspace"


REQUESTS = st.one_of(
    st.builds(
        lambda paths, recursive: deleting(*paths, recursive=recursive),
        st.lists(PATHS, min_size=1, max_size=4, unique=True),
        st.booleans(),
    ),
    st.builds(writing, PATHS, st.sampled_from(["create", "replace", "append"])),
)


@given(st.lists(st.tuples(PATHS, KINDS), max_size=8), REQUESTS)
def test_survey_predicts_the_deletion_exactly(
    ground: Path, made: list[tuple[str, str]], request_: Request
) -> None:
    shutil.rmtree(ground, ignore_errors=True)
    ground.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "WORKSPACE", str(ground))
        for path, kind in made:
            if not any(parent.is_symlink() for parent in (ground / path).parents):
                make(ground, path, kind)
        told = look(request_)
        done = do(request_)  # as a call does that nobody had to approve
    foretold = outcomes(told)
    if request_["do"] == "write":
        assert done.get("fault", {}).get("kind") == foretold[request_["path"]]
        return
    assert done["deleted"] == [path for path, fault in foretold.items() if fault is None]
    assert done["missing"] == [path for path, fault in foretold.items() if fault == "not_found"]
    assert len(done["failed"]) == len(foretold) - len(done["deleted"]) - len(done["missing"])
