"""The `path` boundary of sessions: hostile workspace files and hostile URLs.

A session's programs may put anything into its workspace before its owner reads, writes or lists it,
and a client may send any URL. The wall is a real one.
"""

from __future__ import annotations

import base64
import io
import socket
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conftest import Daemon
from support.attacks import Harm
from support.http import Answer, connect, read_to_end, split_answer
from support.wait import wait_until
from support.workshop import Session, workshop

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S6")]

MB = 1 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with workshop("python") as running:
        yield running


@pytest.fixture(
    scope="module",
    params=[{}, pytest.param({"disk_mb": 32}, marks=pytest.mark.needs("disks"))],
    ids=["memory", "disk"],
)
def session(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Session]:
    made = Session(daemon, image="python", memory_mb=128, **request.param)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def emptied(session: Session) -> Iterator[None]:
    """Empty the workspace after each test."""
    yield
    session.shell("chmod -R u+rwX .; find . -mindepth 1 -delete")


@dataclass(frozen=True)
class Left:
    """What a program leaves in the workspace, and the path that is then requested."""

    name: str
    harm: Harm
    command: str
    path: str
    reads: str = "INVALID_PARAMS"
    writes: str | None = "INVALID_PARAMS"
    """The error code of a write, or None if it is harmless because the file itself is replaced."""

    def __str__(self) -> str:
        return self.name


LEFT = [
    Left("link-to-a-file", Harm.INTERNAL_READ, "ln -s /etc/passwd a", "a"),
    Left("link-to-the-guest", Harm.INTERNAL_READ, "ln -s /opt/fumehood/image.json a", "a"),
    Left("link-to-a-process", Harm.INTERNAL_READ, "ln -s /proc/1/environ a", "a"),
    Left("link-to-a-new-file", Harm.INTERNAL_ESC, "ln -s /tmp/out a", "a"),
    Left("link-to-a-directory", Harm.INTERNAL_READ, "ln -s /etc d", "d/passwd"),
    Left("link-further-up", Harm.INTERNAL_READ, "mkdir d; ln -s /etc d/e", "d/e/passwd"),
    Left("link-to-the-workspace", Harm.INTERNAL_READ, "touch b; ln -s . d", "d/b"),
    Left("link-to-itself", Harm.SELF_DOS, "ln -s a a", "a"),
    Left("fifo", Harm.PEER_DOS, "mkfifo a", "a"),
    Left(
        "socket", Harm.PEER_DOS,
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('a')\"", "a",
    ),
    Left("device-by-a-link", Harm.HOST_DOS, "ln -s /dev/zero a", "a"),
    Left("terminal-by-a-link", Harm.PEER_DOS, "ln -s /dev/stdin a", "a"),
    Left("directory-as-a-file", Harm.INTEGRITY, "mkdir a", "a"),
    Left("file-as-a-directory", Harm.INTEGRITY, "touch d", "d/a", reads="RESOURCE_NOT_FOUND",
         writes=None),
]  # fmt: skip


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_link_or_special_file_left_by_program_is_not_followed(session: Session, left: Left) -> None:
    session.shell(left.command)
    assert session.files("GET", f"/{left.path}").code == left.reads
    assert session.call("read_file", path=left.path).code == left.reads
    if left.writes is not None:
        for answer in (
            session.files("PUT", f"/{left.path}", b"written"),
            session.files("PUT", f"/{left.path}?mode=create", b"written"),
            session.call("write_file", path=left.path, content="written", mode="replace"),
            session.call("write_file", path=left.path, content="written", mode="append"),
        ):
            assert answer.code == left.writes, answer.body
    # The guest's programs look: nothing was written through.
    assert (
        session.shell("cat /tmp/out 2>/dev/null; grep -rl written . 2>/dev/null; true")["stdout"]
        == ""
    )


def test_twin_regular_files_are_read_and_written(session: Session) -> None:
    session.shell("mkdir d; echo -n one > a; echo -n two > d/b")
    assert session.files("GET", "/a").body == b"one"
    assert session.files("GET", "/d/b").body == b"two"
    assert session.call("read_file", path="d/b").body["data"]["content"] == "two"
    assert session.files("PUT", "/a", b"1").status == 200
    assert session.call("write_file", path="d/b", content="2", mode="append").status == 200
    assert session.shell("cat a d/b")["stdout"] == "1two2"


def test_file_modes_set_by_program_are_preserved(session: Session) -> None:
    """Files are returned despite restrictive modes, and the modes do not change."""
    made = session.shell(
        "mkdir d e; for f in d/a e/b c; do echo x > $f; done; chmod 4000 c; chmod 0 d; chmod 400 e"
    )
    assert {file["filename"] for file in made["files"]} == {"d/a", "e/b", "c"}
    modes = "stat -c '%a %n' c d e"
    assert session.shell(modes)["stdout"] == "4000 c\n0 d\n400 e\n"
    session.shell("echo y > f")  # another walk over them
    assert session.shell(modes)["stdout"] == "4000 c\n0 d\n400 e\n"
    shown = session.shell("cat c 2>&1; ls d 2>&1; true")["stdout"]
    assert shown.count("Permission denied") == 2


def test_deleting_a_symlink_does_not_delete_its_target(session: Session) -> None:
    session.shell(
        "mkdir /tmp/out; touch /tmp/out/kept; ln -s /tmp/out d; mkdir e; ln -s /tmp/out e/f"
    )
    assert session.files("DELETE", "/d/kept").code == "INVALID_PARAMS"
    assert session.files("DELETE", "/d?recursive=true").status == 200
    assert session.files("DELETE", "/e?recursive=true").status == 200
    # Files outside of the workspace do not outlive a call, so the same call has to look.
    assert session.shell("ls -A")["stdout"] == ""


ADDRESSES = {
    "parent": "/../../../etc/passwd",
    "parent-escaped": "/%2e%2e/%2e%2e/etc/passwd",
    "parent-half-escaped": "/.%2e/a",
    "parent-in-the-middle": "/d/../a",
    "slash-escaped-with-parent": "/..%2f..%2fetc%2fpasswd",
    "slash-escaped-with-escaped-parent": "/%2e%2e%2F%2e%2e%2Fetc%2Fpasswd",
    "slash-escaped-to-leave-and-return": "/d%2f..%2fa",
    "slash-escaped-absolute": "/%2fetc%2fpasswd",
    "slash-escaped-empty-part": "/d%2f%2fa",
    "slash-escaped-at-the-end": "/d%2F",
    "slash-escaped-current-directory": "/.%2fa",
    "slash-escaped-reserved": "/d%2f.fumehood-upload-x",
    "slash-escaped-too-long-a-path": "/" + "%2F".join(["x" * 200] * 21),
    "slash-overlong": "/d%c0%afa",
    "absolute": "//etc/passwd",
    "empty-part": "/d//a",
    "current-directory": "/./a",
    "directory-with-a-slash": "/d/",
    "empty-path": "/",
    "nul": "/a%00.txt",
    "invalid-utf-8": "/a%ff",
    "surrogate": "/a%ed%a0%80",
    "incomplete-escape": "/a%",
    "invalid-escape": "/a%zz",
    "too-long-a-name": "/" + "x" * 256,
    "too-long-a-path": "/" + "/".join(["x" * 200] * 21),
}


in_memory = pytest.mark.parametrize("session", [{}], indirect=True, ids=["memory"])
"""What is decided on the host, whatever the workspace is on."""

ON_DISK = pytest.param(
    {"disk_mb": 32}, marks=[pytest.mark.needs("disks"), pytest.mark.soak], id="disk"
)
slow = pytest.mark.parametrize("session", [pytest.param({}, id="memory"), ON_DISK], indirect=True)
"""What takes seconds: on a disk only in the soak test."""


@in_memory
@pytest.mark.parametrize("name", ADDRESSES)
def test_ambiguous_file_url_is_refused(session: Session, name: str) -> None:
    session.shell("mkdir d; echo -n secret > d/a; echo -n secret > a")
    for method, body in (("GET", b""), ("PUT", b"written"), ("DELETE", b"")):
        answer = raw(session, method, ADDRESSES[name], body)
        assert answer.code in ("INVALID_PARAMS", "RESOURCE_NOT_FOUND"), (method, answer.body)
        assert "root:" not in str(answer.body)
    assert session.shell("cat d/a a; ls -A")["stdout"] == "secretsecreta\nd\n"


@in_memory
def test_twin_escaped_but_unambiguous_file_url_is_accepted(session: Session) -> None:
    """Each escape stands for one character of a name."""
    for path, name in (
        ("/a%20b", "a b"), ("/a%25b", "a%b"), ("/%C3%BC", "ü"), ("/..a", "..a"), ("/a%0ab", "a\nb"),
        ("/%E2%80%AEa", "\u202ea"), ("/a%3Fb%23", "a?b#"), ("/%61", "a"),
    ):  # fmt: skip
        answer = raw(session, "PUT", path, b"x")
        assert answer.status == 200, (path, answer.body)
        assert answer.body["data"]["path"] == name
    listed = session.files("GET", "?limit=100").body["data"]["items"]
    assert {entry["path"] for entry in listed} == {
        "a b", "a%b", "ü", "..a", "a\nb", "\u202ea", "a?b#", "a",
    }  # fmt: skip


@in_memory
def test_twin_escaped_slash_is_a_slash(session: Session) -> None:
    """As generated clients write it. Only one escape is undone."""
    assert raw(session, "PUT", "/d%2Fe%2fa", b"x").body["data"]["path"] == "d/e/a"
    assert session.shell("cat d/e/a")["stdout"] == "x"
    for address in ("/d/e/a", "/d%2Fe%2Fa", "/d%2fe/a"):
        assert session.files("GET", address).body == b"x"
    assert raw(session, "PUT", "/d%252Fa", b"y").body["data"]["path"] == "d%2Fa"
    assert raw(session, "GET", "/d%2Fa").code == "RESOURCE_NOT_FOUND"
    assert session.shell("ls")["stdout"] == "d\nd%2Fa\n"
    assert raw(session, "DELETE", "/d%2Fe?recursive=true").status == 200


@in_memory
@pytest.mark.parametrize(
    "address",
    [
        "/v1/sessions/{id}%2ffiles/a",
        "/v1/sessions/{id}%2Ffiles%2Fa",
        "/v1/sessions/x/../{id}/files/a",
        "/v1/sessions/{id}/files%2fa",
        "/v1/sessions/%73{tail}/files/a",
    ],
)
def test_ambiguous_session_url_is_refused(session: Session, address: str) -> None:
    session.shell("echo -n secret > a")
    path = address.format(id=session.id, tail=session.id[1:])
    answer = raw_address(session, "GET", path)
    assert answer.code in ("INVALID_PARAMS", "RESOURCE_NOT_FOUND")


def raw(session: Session, method: str, path: str, body: bytes = b"") -> Answer:
    return raw_address(session, method, f"/v1/sessions/{session.id}/files{path}", body)


def raw_address(session: Session, method: str, address: str, body: bytes = b"") -> Answer:
    """Send the request unchanged, without a client that normalizes the address."""
    connection = connect(session.daemon.socket)
    connection.sendall(
        f"{method} {address} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n".encode()
        + body
    )
    raw_answer = read_to_end(connection)
    connection.close()
    return split_answer(raw_answer)


@slow
def test_large_sparse_file_is_sent_in_full(session: Session) -> None:
    session.shell("truncate -s 32M a")
    assert session.files("GET", "/a").body == bytes(32 * MB)
    read = session.call("read_file", path="a", offset=32 * MB - 3).body["data"]
    assert (read["content"], read["has_more"]) == ("\0\0\0", False)


@pytest.fixture
def roomy(daemon: Daemon) -> Iterator[Session]:
    """A session with more memory, which allows more files."""
    made = Session(daemon, image="python", memory_mb=1024)
    yield made
    made.end()


@slow
def test_thousands_of_files_are_listed_completely(roomy: Session) -> None:
    made = int(roomy.python(
        "import os\nmade = 0\ntry:\n    while made < 10_000:\n"
        "        open(f'{made:05}', 'x').close()\n        made += 1\nexcept OSError:\n    pass\nmade"
    )["value"])  # fmt: skip
    assert made >= 1500  # not vacuous: several times what the guest gives at once
    seen: list[str] = []
    cursor = ""
    while True:
        page = roomy.files("GET", f"?limit=100{cursor}").body["data"]
        seen += [entry["path"] for entry in page["items"]]
        if page["pagination"]["next_cursor"] is None:
            break
        cursor = f"&cursor={page['pagination']['next_cursor']}"
    assert seen == [f"{number:05}" for number in range(made)]


def test_undecodable_file_names_do_not_break_listing(session: Session) -> None:
    session.shell(
        "touch $'a\\nb' $'\\xff\\xfe' $'\\u202efdp.exe' $'\\e]0;owned\\a' 'c'; mkdir $'d\\xff'; touch $'d\\xff/e'"
    )
    listed = session.files("GET", "?recursive=true&limit=100").body["data"]["items"]
    assert [entry["path"] for entry in listed] == ["\x1b]0;owned\x07", "a\nb", "c", "\u202efdp.exe"]
    tool = session.call("list_files", recursive=True, limit=100).body["data"]["items"]
    assert tool == listed


def half_an_upload(session: Session) -> socket.socket:
    """An upload of 2 MB with 1.5 MB sent, of which 1 MB has reached the session."""
    connection = connect(session.daemon.socket)
    connection.sendall(
        f"PUT /v1/sessions/{session.id}/files/a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-length: {2 * MB}\r\n\r\n".encode()
        + b"x" * (3 * MB // 2)
    )
    wait_until(
        lambda: (
            session.shell("cat .fumehood-upload-* 2>/dev/null | wc -c; true")["stdout"] == f"{MB}\n"
        )
    )
    return connection


@pytest.mark.parametrize(
    "command",
    [
        "for f in .fumehood-upload-*; do echo more >> $f; done",
        "for f in .fumehood-upload-*; do rm $f; ln -s /tmp/out $f; done",
        "for f in .fumehood-upload-*; do rm $f; mkfifo $f; done",
        "for f in .fumehood-upload-*; do rm $f; mkdir $f; done",
        "rm .fumehood-upload-*",
    ],
)
def test_upload_tampered_with_by_program_is_refused(session: Session, command: str) -> None:
    connection = half_an_upload(session)
    session.shell(command)
    connection.sendall(b"x" * (MB // 2))
    answer = split_answer(read_to_end(connection))
    connection.close()
    assert answer.code in ("INVALID_PARAMS", "RESOURCE_NOT_FOUND"), answer.body
    assert session.files("GET", "/a").code == "RESOURCE_NOT_FOUND"
    assert session.shell("cat /tmp/out 2>/dev/null | wc -c")["stdout"] == "0\n"


def test_twin_upload_beside_harmless_program_is_complete(session: Session) -> None:
    """A program runs in the middle of the upload."""
    connection = half_an_upload(session)
    session.shell("echo harmless > b")
    connection.sendall(b"x" * (MB // 2))
    assert split_answer(read_to_end(connection)).body["data"] == {"path": "a", "size": 2 * MB}
    connection.close()
    assert session.files("GET", "/a").body == b"x" * (2 * MB)


def tarred(*members: tuple[str, int | str]) -> bytes:
    """An archive of members: a name with a size, or with the name of its type."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, what in members:
            member = tarfile.TarInfo(name)
            if isinstance(what, int):
                member.size = what
                archive.addfile(member, io.BytesIO(bytes(what)))
            else:
                member.type, member.linkname = getattr(tarfile, what), "/etc"
                archive.addfile(member)
    return file.getvalue()


def archived(session: Session, method: str, query: str = "", body: bytes | None = None) -> Answer:
    return session.http.request(method, f"/v1/sessions/{session.id}/archive{query}", body)


@pytest.mark.parametrize(
    "members",
    [
        (("out", "SYMTYPE"), ("out/x", 1)),
        (("ok", 1), ("/etc/x", 1)),
        (("ok", 1), ("../x", 1)),
        (("ok", 1), ("disk", "BLKTYPE")),
        (("ok", 1), ("hard", "LNKTYPE")),
    ],
    ids=["through-a-link", "absolute", "parent", "device", "hard-link"],
)
def test_hostile_archive_is_refused_and_leaves_nothing(
    session: Session, members: tuple[tuple[str, int | str], ...]
) -> None:
    answer = archived(session, "PUT", body=tarred(*members))
    assert (answer.status, answer.code) == (400, "INVALID_PARAMS")
    assert "Not an uncompressed tar archive" in answer.body["error"]["message"]
    assert session.shell("find . -mindepth 1 | wc -l")["stdout"] == "0\n"


def test_twin_plain_archive_is_unpacked(session: Session) -> None:
    answer = archived(session, "PUT", "?path=a/b", tarred(("ok", 1), ("d/e", 2)))
    assert answer.body["data"] == {"path": "a/b", "files": 2, "size": 3}
    assert session.shell("find . -type f | sort")["stdout"] == "./a/b/d/e\n./a/b/ok\n"


def test_module_in_the_workspace_is_not_loaded_to_unpack_an_archive(session: Session) -> None:
    """A program of the session could forge the answer, and would run outside of a call."""
    session.shell('for m in tarfile copy struct grp; do echo \'open("ran", "w")\' > $m.py; done')
    answer = archived(session, "PUT", body=tarred(("ok", 1)))
    assert answer.body["data"] == {"path": "", "files": 1, "size": 1}
    assert session.shell("ls")["stdout"] == "copy.py\ngrp.py\nok\nstruct.py\ntarfile.py\n"


@slow
def test_archive_without_room_is_refused_and_the_session_continues(session: Session) -> None:
    """Its files take as much again, and a million of them are more than the wall allows."""
    half = archived(session, "PUT", body=tarred(*((str(n), MB) for n in range(20))))
    assert (half.status, half.code) == (400, "INVALID_PARAMS")
    assert "full" in half.body["error"]["message"]
    session.shell("find . -mindepth 1 -delete")
    many = archived(session, "PUT", body=tarred(*((f"d/{n}", 0) for n in range(12_000))))
    assert (many.status, many.code) == (400, "INVALID_PARAMS")
    session.shell("find . -mindepth 1 -delete")
    assert archived(session, "PUT", body=tarred(("ok", 1))).status == 200


@slow
def test_archive_of_holes_larger_than_the_workspace_is_refused(session: Session) -> None:
    """It would fill the disk of whoever downloads it."""
    session.shell("for n in 1 2 3 4 5; do truncate -s 20M h$n; done")
    got = archived(session, "GET")
    assert (got.status, got.code) == (400, "INVALID_PARAMS")
    session.shell("rm h1 h2 h3 h4")
    assert archived(session, "GET").status == 200


def test_archive_of_hostile_files_has_only_plain_ones(session: Session) -> None:
    session.shell(
        "mkdir d; echo 1 > d/plain; ln -s /etc/passwd d/link; mkfifo d/pipe; ln d/plain d/same; "
        'python3 -c \'import os; os.mkdir(b"d/\\xff"); open(b"d/a\\nb", "w")\''
    )
    got = archived(session, "GET", "?path=d")
    with tarfile.open(fileobj=io.BytesIO(got.body)) as archive:
        members = {one.name: one.type for one in archive}
    assert members == dict.fromkeys(("plain", "same", "a\nb"), tarfile.REGTYPE)


@slow
def test_upload_to_full_workspace_is_refused_and_works_after_deletion(session: Session) -> None:
    session.shell("head -c 30000000 /dev/zero > full")
    answer = session.files("PUT", "/a", b"x" * (16 * MB))
    assert (answer.code, "is full" in answer.body["error"]["message"]) == ("INVALID_PARAMS", True)
    assert session.shell("ls -A")["stdout"] == "full\n"
    assert session.files("DELETE", "/full").status == 200
    assert session.files("PUT", "/a", b"x" * (16 * MB)).status == 200


def test_file_tools_refuse_paths_outside_the_workspace(session: Session) -> None:
    for path in ("../a", "/etc/passwd", "a/../../b", "", "a\0"):
        for answer in (
            session.call("read_file", path=path),
            session.call("write_file", path=path, content="x"),
            session.call("list_files", path=path) if path else session.call("read_file", path=""),
        ):
            assert answer.code == "INVALID_PARAMS", path
    content = base64.b64encode(bytes(range(256))).decode()
    assert session.call("write_file", path="a", content_base64=content).status == 200  # the twin
    assert session.call("read_file", path="a").body["data"]["content_base64"] == content
