"""File operations of a session's owner, on an ordinary directory in the workspace's place."""

from __future__ import annotations

import base64
import io
import mmap
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fumehood.guest.container import files, walk

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


def test_upload_in_pieces_is_visible_only_when_complete(do: Do, place: Path) -> None:
    assert do("put", token=TOKEN, offset=0, content=b"abc") == {"size": 3}
    assert do("put", token=TOKEN, offset=3, content=b"def") == {"size": 6}
    assert listed(do) == []
    assert do("finish", token=TOKEN, path="d/whole", size=6, mode="create") == {"size": 6}
    assert listed(do) == ["d", "d/whole"]
    assert (place / "d/whole").read_bytes() == b"abcdef"


def test_sweep_removes_what_was_cut_off_and_nothing_else(do: Do, place: Path) -> None:
    """A write takes one request, so that none is in progress; an upload may be."""
    upload, write = f"{files.UPLOAD_PREFIX}{TOKEN}", f"{walk.WRITE_PREFIX}{TOKEN}"
    (place / "d/e").mkdir(parents=True)
    kept = ["d/x", f"d/{files.UPLOAD_PREFIX}x", f"{upload}0", f"a{upload}"]
    for path in (upload, write, f"d/e/{write}", *kept):
        (place / path).write_text("half")
    (place / f"d/{write}").mkdir()  # by a program: neither it nor what it leads to is removed
    (place / f"d/e/{upload}").symlink_to(place / "d/x")
    (place / "out").symlink_to(place.parent)
    (place.parent / write).write_text("outside")
    closed = place / "closed"
    closed.mkdir(mode=0)
    assert do("sweep", uploads=False) == {"removed": 2}
    assert (place / upload).exists()
    assert do("sweep", uploads=True) == {"removed": 1}
    assert do("sweep", uploads=True) == {"removed": 0}
    assert all((place / path).read_text() == "half" for path in kept)
    assert (place / f"d/{write}").is_dir()
    assert (place / f"d/e/{upload}").is_symlink()
    assert (place.parent / write).read_text() == "outside"
    assert closed.stat().st_mode & 0o777 == 0


# -- versions -----------------------------------------------------------------------------


@pytest.fixture
def in_memory(place: Path, tmp_path: Path) -> Iterator[Path]:
    """The workspace on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        place.rmdir()
        place.symlink_to(directory)
        yield Path(directory)


def version(do: Do) -> str:
    (row,) = do("scan", after="", most=10, room=1000)["rows"]
    told: str = row[3]
    return told


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The processes beside the guest; no file has changed just now."""
    proc = tmp_path / "proc"
    proc.mkdir()
    monkeypatch.setattr(files, "PROC", str(proc))
    monkeypatch.setattr(files, "RECENT_NS", -(1 << 62))
    return proc


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("by_times", [False, True], ids=["content", "control"])
def test_attack_write_through_a_map_gives_a_file_in_memory_another_version(
    do: Do, in_memory: Path, monkeypatch: pytest.MonkeyPatch, by_times: bool
) -> None:
    """Twin: without a write, the version stays. Control: by its times, the file stays the same."""
    monkeypatch.setattr(files, "_is_timed", lambda: by_times)
    (in_memory / "a").write_bytes(b"A" * 5000)
    before = version(do)
    with (in_memory / "a").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        assert memory[:1] == b"A"
        assert version(do) == before
        memory[:1] = b"B"
    assert (version(do) == before) is by_times


@pytest.mark.parametrize("how", ["plain", "read-only", "hidden", "other thread"])
def test_attack_map_that_a_process_keeps_leaves_no_file_with_a_version(
    do: Do, place: Path, processes: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A page that was written once can be written again without a trace, also if the process hides
    its maps, has given up the right to write until then, or if its first thread has ended. Twin:
    once it has ended, even if its parent has not noticed.
    """
    monkeypatch.setattr(files, "_is_timed", lambda: True)
    (place / "a").write_bytes(b"A" * 5000)
    code = f"""
import ctypes, mmap, os, platform, threading
file = open({str(place / "a")!r}, "r+b")
memory = mmap.mmap(file.fileno(), 0)
memory[0:1] = b"B"
kernel = ctypes.CDLL(None)
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
if {how!r} == "read-only":
    assert kernel.mprotect(at, 4096, mmap.PROT_READ) == 0
if {how!r} == "hidden":
    assert kernel.prctl(4, 0, 0, 0, 0) == 0
def wait():
    while {how!r} == "other thread" and ") Z" not in open(f"/proc/{{os.getpid()}}/stat").read():
        os.sched_yield()
    print("ready", flush=True)
    input()
    os._exit(0)
if {how!r} == "other thread":
    threading.Thread(target=wait).start()
    kernel.syscall(60 if platform.machine() == "x86_64" else 93, 0)
wait()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (processes / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        if how == "hidden" and os.geteuid() == 0:  # root would see its maps
            monkeypatch.setattr(
                "builtins.open", _closed_to(f"{processes}/{process.pid}/task/{process.pid}/maps")
            )
        assert version(do) == ""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert version(do) != ""
    (processes / str(process.pid)).unlink()
    assert version(do) != ""


def _closed_to(path: str) -> Callable[..., Any]:
    def opened(name: Any, *rest: Any, **more: Any) -> Any:
        if name == path:
            raise PermissionError(path)
        return plain(name, *rest, **more)

    plain = open
    return opened


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


def altered(field: slice, value: bytes) -> bytes:
    """An archive whose header has another field, and the right checksum."""
    header = bytearray(archive(("a", b"x"))[:512])
    header[field] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(2048)


WHOLE = archive(("a", b"x" * 1000), ("b", b"y" * 1000))
NOT_PLAIN: dict[str, bytes] = {
    "empty": b"",
    "text": b"no archive at all" * 100,
    "packed": b"\x1f\x8b" * 512,
    "cut in a file": WHOLE[:700],
    "cut in a header": WHOLE[:1900],
    "huge": altered(slice(124, 136), b"\x80" + b"\x7f" * 11),
    "negative": altered(slice(124, 136), b"\xff" * 12),
    "chain": tarfile.TarInfo("L" * 300).tobuf(tarfile.GNU_FORMAT)[:1024] * 3000,
    "directory-file": archive(("d/", "DIRTYPE"), ("d", b"")),
    "file-directory": archive(("e", b""), ("e/", "DIRTYPE")),
    "below": archive(("e/f", b""), ("e", b"")),
    "upload": archive((".fumehood-upload-" + "a" * 32, b"")),
    **{
        name[:20]: archive(("first", b"1"), (name, what))
        for name, what in (
            ("/etc/x", b""), ("../x", b""), ("a/../../x", b""), ("a//b", b""), ("a/./b", b""),
            ("..", "DIRTYPE"), ("link", "SYMTYPE"), ("hard", "LNKTYPE"), ("pipe", "FIFOTYPE"),
            ("disk", "BLKTYPE"), ("tty", "CHRTYPE"), ("sparse", "GNUTYPE_SPARSE"),
            ("/".join("d" * 66), b""),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_archive_with_links_or_ways_out_is_refused_before_a_write(
    do: Do, place: Path, name: str
) -> None:
    assert fault(unpack(do, NOT_PLAIN[name])) == "archive"
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
