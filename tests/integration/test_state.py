"""The daemon's files: private from creation, one lock, one socket."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from fumehood.http.server import private_socket
from fumehood.storage.directory import StateError, hold_lock, private_directory


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def _leave_stale_socket(path: Path) -> None:
    """A socket whose owner died: bound but without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))


@pytest.mark.row("D1")
def test_state_directory_is_created_with_mode_700_despite_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        made = private_directory(home / "state")
    finally:
        os.umask(before)
    assert _mode(made) == 0o700
    assert private_directory(made) == made


@pytest.mark.row("D1")
@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770, 0o777, 0o704])
def test_state_directory_open_to_others_is_refused_with_the_cure(home: Path, mode: int) -> None:
    directory = home / "state"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(StateError, match="chmod 700"):
        private_directory(directory)
    assert _mode(directory) == mode


def test_state_directory_of_another_user_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StateError, match="another user"):
        private_directory(home)


def test_file_in_place_of_the_state_directory_is_refused(home: Path) -> None:
    (home / "state").write_bytes(b"")
    with pytest.raises(StateError, match="cannot be made"):
        private_directory(home / "state")


@pytest.mark.row("D6")
def test_lock_is_exclusive_and_released(home: Path) -> None:
    with hold_lock(home / "lock", "this directory"):
        assert _mode(home / "lock") == 0o600
        with (
            pytest.raises(StateError, match="Another engine uses this directory"),
            hold_lock(home / "lock", "this directory"),
        ):
            pass
    with hold_lock(home / "lock", "this directory"):
        assert (home / "lock").exists()


def test_lock_does_not_follow_a_symlink(home: Path) -> None:
    target = home / "target"
    target.write_bytes(b"mine")
    (home / "lock").symlink_to(target)
    with pytest.raises(StateError, match="cannot be opened"), hold_lock(home / "lock", "it"):
        pass
    assert target.read_bytes() == b"mine"


@pytest.mark.row("D1")
def test_socket_is_private_to_its_owner_listens_and_is_removed(home: Path) -> None:
    before = os.umask(0)
    try:
        with private_socket(home / "s"):
            assert _mode(home / "s") == 0o600
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(str(home / "s"))
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert not (home / "s").exists()


@pytest.mark.row("D6")
def test_stale_socket_is_replaced(home: Path) -> None:
    _leave_stale_socket(home / "s")
    with private_socket(home / "s") as listener:
        assert listener.getsockname() == str(home / "s")


@pytest.mark.row("D6")
def test_socket_with_a_listener_is_not_replaced(home: Path) -> None:
    with private_socket(home / "s"):
        found = (home / "s").lstat().st_ino
        with pytest.raises(StateError, match="Another process listens"), private_socket(home / "s"):
            pass
        assert (home / "s").lstat().st_ino == found


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_non_socket_in_place_of_the_socket_is_never_removed(home: Path, kind: str) -> None:
    path = home / "s"
    if kind == "file":
        path.write_bytes(b"precious")
    elif kind == "directory":
        path.mkdir()
    else:
        _leave_stale_socket(home / "other")
        path.symlink_to(home / "other")
    with pytest.raises(StateError, match="is not a socket"), private_socket(path):
        pass
    assert os.path.lexists(path)


def test_unbindable_socket_path_is_refused_with_its_reason(home: Path) -> None:
    with pytest.raises(StateError, match="cannot be bound"), private_socket(home / "no" / "s"):
        pass
