"""Open the daemon's two sockets and its address, for no more users than intended.

Host side. For a single user both sockets are private to the owner. For a service, each is in its
own directory, which admits one group. Invariant: a socket is private to its owner until its group
and mode are set, and no client can connect before that.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fumehood.config import Config
from fumehood.core.fair_share import FairShare
from fumehood.protocol.loopback import listen_on
from fumehood.storage.directory import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    StateError,
    hold_lock,
    private_directory,
)

BACKLOG = 2048
SHARED_FILE = 0o660
SHARED_DIRECTORY = 0o750
PASSABLE_DIRECTORY = 0o711
FIRST_SYSTEMD_FD = 3
LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


@dataclass(frozen=True, slots=True)
class Listeners:
    """The callers' socket, and the control socket for approvers and administrators."""

    engine: socket.socket
    control: socket.socket


@contextmanager
def listening(config: Config) -> Iterator[Listeners]:
    """Listen on both sockets, which systemd passed or which are created here.

    Raises:
        StateError: a path is not private or is in use, or its group does not exist.
        ConfigError: a path is too long.
    """
    service = config.service if config.mode == "service" else None
    given = sockets_from_systemd()
    if given is not None:
        yield given
        return
    if service is not None and config.socket is not None:
        raise StateError(
            'With mode = "service" each socket stands in a directory of its own under '
            "service.run_directory. Set that, and leave socket (FUMEHOOD_SOCKET) to the clients."
        )
    with ExitStack() as places:
        made: dict[str, socket.socket] = {}
        # The callers' socket comes last: a client that can call finds everything ready.
        for name, path, group in (
            ("control", config.control_socket_path, service.approvers_group if service else None),
            ("engine", config.socket_path, service.callers_group if service else None),
        ):
            if group:
                _group_directory(path.parent, group)
            else:
                private_directory(path.parent)
            lock = (config.state_directory if group else path.parent) / f"{path.name}.lock"
            places.enter_context(hold_lock(lock, "this socket"))
            made[name] = places.enter_context(private_socket(path, group))
        yield Listeners(**made)


@contextmanager
def listening_on_tcp(config: Config) -> Iterator[list[socket.socket]]:
    """Listen on the configured address, if there is one.

    Raises:
        StateError: the address cannot be used.
    """
    if config.tcp is None:
        yield []
        return
    host, port = config.tcp.rsplit(":", 1)
    try:
        listener = listen_on(host, int(port), anywhere=config.tls is not None)
    except OSError as error:
        raise StateError(f"{config.tcp} cannot be listened on: {error.strerror}.") from None
    with listener:
        yield [listener]


class CountingListener(socket.socket):
    """A listening socket that counts each connection by its address, from its accept to its close.

    For TLS: nothing else counts a connection before its handshake, and each takes 0.3 MB. Further
    ones are closed at once.
    """

    def __init__(self, listener: socket.socket, shares: FairShare) -> None:
        super().__init__(fileno=listener.detach())
        self._shares = shares

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError, which asyncio expects, if closed."""
        connection, peer = super().accept()
        address: str = peer[0]
        if self._shares.take(address) is not None:
            connection.close()
            logging.getLogger("uvicorn.error").warning(
                "Too many connections from one address or in all; further ones are closed."
            )
            raise ConnectionAbortedError
        return _Counted(connection, partial(self._shares.give_back, address)), peer


class _Counted(socket.socket):
    """A connection that calls `on_close` once."""

    def __init__(self, connection: socket.socket, on_close: Callable[[], None]) -> None:
        super().__init__(fileno=connection.detach())
        self._on_close = on_close

    def close(self) -> None:
        """Close the connection."""
        if self.fileno() >= 0:
            self._on_close()
        super().close()


def sockets_from_systemd() -> Listeners | None:
    """Return the sockets that systemd passed to this process, or None if it passed none.

    *Source*: sd_listen_fds(3): descriptors from 3 on, named by LISTEN_FDNAMES.

    Raises:
        StateError: they are not the two expected sockets, or are open to all users.
    """
    # Always removed: a child must not take them for its own.
    pid, count, names = (os.environ.pop(variable, "") for variable in LISTEN_VARIABLES)
    if pid != str(os.getpid()):
        return None
    if count != "2" or sorted(names.split(":")) != ["control", "engine"]:
        raise StateError(
            "systemd must pass two sockets, FileDescriptorName=engine and =control; it passed "
            f"{count[:10]}: {names[:100]}."
        )
    try:
        given = {
            name: _given_socket(FIRST_SYSTEMD_FD + number, name)
            for number, name in enumerate(names.split(":"))
        }
    except OSError as error:
        raise StateError(f"What systemd passed is not a socket: {error.strerror}.") from None
    if given["engine"].getsockname() == given["control"].getsockname():
        raise StateError(
            "systemd passed two sockets with the same path, which cannot be told apart."
        )
    return Listeners(**given)


def _given_socket(descriptor: int, name: str) -> socket.socket:
    os.set_inheritable(descriptor, False)
    listener = socket.socket(fileno=descriptor)
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    is_stream = listener.type == socket.SOCK_STREAM
    # An abstract name has no file mode: every user could connect.
    if not is_stream or not isinstance(path, str) or not path.startswith("/"):
        raise StateError(f"The socket {name} from systemd must be ListenStream= with a path.")
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise StateError(f"The socket {name} from systemd does not listen (Accept=no is needed).")
    if stat.S_IMODE(Path(path).lstat().st_mode) & 0o007:
        raise StateError(
            f"The socket {name} from systemd must be closed to others (SocketMode=0660 or 0600)."
        )
    return listener


@contextmanager
def private_socket(path: Path, group: str | None = None) -> Iterator[socket.socket]:
    """Listen on a Unix socket for its owner and, if given, a group. Replaces a stale socket.

    The caller must hold the locks on the state directory and the socket. A socket at the path on
    which nobody listens is then left over from an engine that died.

    Raises:
        StateError: the path is not a socket, or another process listens on it.
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
        if stat.S_IMODE(path.lstat().st_mode) != PRIVATE_FILE:
            raise StateError(f"The socket {path} did not get mode 0600. Use another file system.")
        if group is not None:
            _give_to_group(path, path, group, SHARED_FILE)
        listener.listen(BACKLOG)
        yield listener
        path.unlink(missing_ok=True)  # under the lock nobody else listens there
    finally:
        listener.close()


def _group_directory(directory: Path, group: str) -> None:
    """Create `directory` for a group, and let all users pass through its parent."""
    _refuse_changeable(directory.parent)
    with _own_directory(directory.parent) as parent:
        os.fchmod(parent, PASSABLE_DIRECTORY)
        with _own_directory(directory) as descriptor:
            _give_to_group(descriptor, directory, group, SHARED_DIRECTORY)


def _refuse_changeable(path: Path) -> None:
    """Raise StateError if others could replace the path, because they may write to a parent."""
    for above in path.parents:
        if not above.exists():
            continue
        found = above.stat()
        is_shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if is_shared or found.st_uid not in (0, os.geteuid()):
            raise StateError(
                f"{path} could be replaced by other users, who may write to {above}. Choose "
                "another service.run_directory, such as /run/fumehood."
            )


@contextmanager
def _own_directory(path: Path) -> Iterator[int]:
    """Open a directory that the engine's user owns. Creates it if needed.

    A link is refused, because it would let others choose the directory whose mode changes.
    """
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(f"The directory {path} cannot be used: {error.strerror}.") from None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise StateError(f"The directory {path} belongs to another user.")
        yield descriptor
    finally:
        os.close(descriptor)


def _give_to_group(which: Path | int, path: Path, group: str, mode: int) -> None:
    try:
        os.chown(which, -1, grp.getgrnam(group).gr_gid)
        os.chmod(which, mode)  # noqa: PTH101  # also takes a descriptor
    except KeyError:
        raise StateError(
            f"There is no group {group!r}. Make it: groupadd --system {group}"
        ) from None
    except PermissionError:
        raise StateError(
            f"{path} cannot be given to the group {group!r}: the engine's user must be in it."
        ) from None


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StateError(f"{path} exists and is not a socket. Remove it or choose another path.")
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
