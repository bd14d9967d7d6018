"""Only what its owner alone can have written is opened, and nothing is followed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from fumehood.sandbox.trusted_files import (
    MAX_FILE_BYTES,
    MAX_FILES,
    Untrusted,
    list_files,
    open_directory,
    read_file,
    signature_of,
)
from support.definition_files import DefinitionDirectory

OWNERS = frozenset({0, os.geteuid()})


@pytest.fixture
def opened(definitions: DefinitionDirectory) -> Iterator[int]:
    descriptor = open_directory(definitions.path, OWNERS)
    yield descriptor
    os.close(descriptor)


@pytest.mark.row("R4")
def test_private_file_in_a_private_directory_is_read(
    definitions: DefinitionDirectory, opened: int
) -> None:
    path = definitions.put("a.json", b"[1]", mode=0o644)
    data, signature = read_file(opened, "a.json", OWNERS)
    assert data == b"[1]"
    assert signature == signature_of(path.stat()) == list_files(opened)["a.json"]


@pytest.mark.row("R4")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_directory_writable_by_others_is_refused_with_a_remedy(
    definitions: DefinitionDirectory, mode: int
) -> None:
    definitions.path.chmod(mode)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Untrusted, match="chmod go-w"):
        open_directory(definitions.path, OWNERS)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.row("R4")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_directory_below_one_that_others_can_write_is_refused(
    definitions: DefinitionDirectory, mode: int
) -> None:
    below = definitions.path / "tools"
    below.mkdir(mode=0o700)
    definitions.path.chmod(mode)
    with pytest.raises(Untrusted, match="above it can be written by others"):
        open_directory(below, OWNERS)
    definitions.path.chmod(mode | 0o1000)  # as /tmp: nobody can move what belongs to another
    os.close(open_directory(below, OWNERS))


@pytest.mark.parametrize("what", ["missing", "file", "link to nowhere"])
def test_path_that_is_not_a_directory_is_refused(
    definitions: DefinitionDirectory, what: str
) -> None:
    path = definitions.path / "tools"
    if what == "file":
        path.write_bytes(b"")
    if what == "link to nowhere":
        path.symlink_to("nowhere")
    with pytest.raises(Untrusted, match="cannot be opened"):
        open_directory(path, OWNERS)


def test_link_in_the_configured_path_is_resolved_and_its_target_checked(
    definitions: DefinitionDirectory,
) -> None:
    target = definitions.path / "target"
    target.mkdir(mode=0o700)
    link = definitions.path / "link"
    link.symlink_to(target)
    os.close(open_directory(link, OWNERS))
    target.chmod(0o777)
    with pytest.raises(Untrusted, match="chmod go-w"):
        open_directory(link, OWNERS)


@pytest.mark.row("R4")
@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_file_that_others_can_write_is_refused(
    definitions: DefinitionDirectory, opened: int, mode: int
) -> None:
    definitions.put("a.json", b"[]", mode=mode)
    with pytest.raises(Untrusted, match="chmod go-w"):
        read_file(opened, "a.json", OWNERS)


@pytest.mark.row("R4")
def test_only_regular_definition_files_are_opened(
    definitions: DefinitionDirectory, opened: int
) -> None:
    os.mkfifo(definitions.path / "pipe.json", 0o600)
    (definitions.path / "directory.json").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(definitions.path / "socket.json"))
        (definitions.path / "socket.json").chmod(0o600)
        for name in ("pipe.json", "socket.json", "directory.json"):
            with pytest.raises(Untrusted, match="not a regular file"):
                read_file(opened, name, OWNERS)


def test_file_at_the_size_limit_is_read_and_one_byte_more_is_not(
    definitions: DefinitionDirectory, opened: int
) -> None:
    definitions.put("a.json", b" " * MAX_FILE_BYTES)
    assert len(read_file(opened, "a.json", OWNERS)[0]) == MAX_FILE_BYTES
    definitions.put("a.json", b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(Untrusted, match="larger than 1 MB"):
        read_file(opened, "a.json", OWNERS)


def test_editor_backup_files_are_skipped(definitions: DefinitionDirectory, opened: int) -> None:
    for name in ("a.json", ".a.json.swp", "a.json~", "README"):
        definitions.put(name, b"[]")
    assert list_files(opened).keys() == {"a.json", "README"}


def test_directory_with_too_many_files_is_refused(
    definitions: DefinitionDirectory, opened: int
) -> None:
    for number in range(MAX_FILES):
        (definitions.path / f"{number}.json").touch(0o600)
    assert len(list_files(opened)) == MAX_FILES
    (definitions.path / "one-more.json").touch(0o600)
    with pytest.raises(Untrusted, match="more than 1000 files"):
        list_files(opened)
