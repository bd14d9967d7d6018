"""The daemon's two sockets: never open to more than they are meant for.

Host side, before anything listens. For a single user both are the owner's alone. As a
service each stands in a directory of its own, which lets in one group. Invariant: a socket
is its owner's alone until its group and mode are set, and nobody can connect before that.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fumehood.config import Config
from fumehood.store.directory import PRIVATE_FILE, StateError, hold_lock, private_directory

BACKLOG = 2048
SHARED_FILE = 0o660
SHARED_DIRECTORY = 0o750
PASSABLE_DIRECTORY = 0o711
FIRST_SYSTEMD_FD = 3


@dataclass(frozen=True, slots=True)
class Listeners:
    """The callers' socket and the one for approvers and administrators."""

    engine: socket.socket
    control: socket.socket

    @property
    def control_path(self) -> str:
        """What the kernel calls the control socket."""
        path: str = self.control.getsockname()
        return path


@contextmanager
def listening(config: Config) -> Iterator[Listeners]:
    """Both sockets, from systemd or made here.

    Raises:
        StateError: a place is not private, is used, or its group does not exist.
        ConfigError: a path is too long.
    """
    given = sockets_from_systemd()
    if given is not None:
        yield given
        return
    service = config.service if config.mode == "service" else None
    with ExitStack() as places:
        made = []
        for path, group in (
            (config.socket_path, service.callers_group if service else None),
            (config.control_socket_path, service.approvers_group if service else None),
        ):
            directory = _group_directory(path.parent, group) if group else None
            if directory is None:
                private_directory(path.parent)
            lock = (config.state_directory if group else path.parent) / f"{path.name}.lock"
            places.enter_context(hold_lock(lock, "this socket"))
            made.append(places.enter_context(private_socket(path, group)))
        yield Listeners(*made)


def sockets_from_systemd() -> Listeners | None:
    """The sockets that systemd listens on for this process, or None where it does not.

    *Source*: sd_listen_fds(3): descriptors from 3 on, named by LISTEN_FDNAMES.

    Raises:
        StateError: they are not the two that belong here, or are open to everybody.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    count = int(os.environ.get("LISTEN_FDS", "0") or 0)
    for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(variable, None)  # a child must not take them for its own
    given = {
        name: socket.socket(fileno=FIRST_SYSTEMD_FD + number)
        for number, name in enumerate(names[:count])
    }
    if given.keys() != {"engine", "control"}:
        raise StateError(
            "systemd must pass two sockets, FileDescriptorName=engine and =control; it passed "
            + (", ".join(sorted(given)) or "none")
            + "."
        )
    for name, listener in given.items():
        path = listener.getsockname()
        if listener.family != socket.AF_UNIX or not path or stat.S_IMODE(_mode(path)) & 0o007:
            raise StateError(
                f"The socket {name} from systemd must be a Unix socket that is closed to others "
                "(SocketMode=0660 or 0600)."
            )
        os.set_inheritable(listener.fileno(), False)
    return Listeners(**given)


@contextmanager
def private_socket(path: Path, group: str | None = None) -> Iterator[socket.socket]:
    """A listening socket for its owner, and the group if one is named; replaces a stale one.

    The caller holds the locks on state directory and socket, so whatever stands at the
    path without an answer is left over from an engine that died.

    Raises:
        StateError: something else stands there, or somebody answers.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            raise StateError(f"The socket {path} cannot be bound: {error.strerror}.") from None
        finally:
            os.umask(before)
        inode = path.lstat()
        if stat.S_IMODE(inode.st_mode) != PRIVATE_FILE:
            raise StateError(f"The socket {path} did not get mode 0600; this file system is unfit.")
        if group is not None:
            _give_to_group(path, group, SHARED_FILE)
        listener.listen(BACKLOG)
        yield listener
        _remove_own(path, inode)
    finally:
        listener.close()


def _group_directory(directory: Path, group: str) -> Path:
    """`directory`, which lets in a group, in a parent that everybody may pass through."""
    directory.parent.mkdir(mode=PASSABLE_DIRECTORY, parents=True, exist_ok=True)
    directory.mkdir(mode=SHARED_DIRECTORY, exist_ok=True)
    for place in (directory.parent, directory):
        if place.stat().st_uid != os.geteuid():
            raise StateError(f"The directory {place} belongs to another user.")
    directory.parent.chmod(PASSABLE_DIRECTORY)
    _give_to_group(directory, group, SHARED_DIRECTORY)
    return directory


def _give_to_group(path: Path, group: str, mode: int) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
        path.chmod(mode)
    except KeyError:
        raise StateError(
            f"There is no group {group!r}. Make it: groupadd --system {group}"
        ) from None
    except PermissionError:
        raise StateError(
            f"{path} cannot be given to the group {group!r}: the engine's user must be in it."
        ) from None


def _mode(path: str) -> int:
    return Path(path).lstat().st_mode


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StateError(f"{path} exists and is no socket. Remove it or choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return
            raise StateError(f"The socket {path} cannot be checked: {error.strerror}.") from None
    raise StateError(f"Another process listens on {path}. Stop it, or set FUMEHOOD_SOCKET.")


def _remove_own(path: Path, ours: os.stat_result) -> None:
    """Remove the socket, unless somebody has put another in its place."""
    try:
        found = path.lstat()
        if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
            path.unlink()
    except FileNotFoundError:
        pass
