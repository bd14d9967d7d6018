"""The server: one engine behind two Unix sockets, until a signal stops it gracefully.

Host side, started by `fumehood serve`. The server takes the state directory's lock, starts the
engine, and then opens the sockets, so that every client that connects finds a working engine. When
the server stops, it refuses new calls, waits up to `drain_seconds` for the running calls, and then
ends everything. It notifies a service manager, if there is one, with the protocol of sd_notify(3).

In single-user mode, both sockets are private to the owner. In service mode, each socket is in its
own directory, which only one group can enter. Invariant: a socket is private to its owner until its
group and mode are set, and no client can connect before then.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import grp
import logging
import math
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fumehood.config import Config, ConfigError, TlsSettings
from fumehood.core.errors import EngineError, ShuttingDown
from fumehood.core.fair_share import FairShare
from fumehood.core.json_types import JsonObject
from fumehood.core.status import Health, Readiness, StateReadiness
from fumehood.engine import Tool
from fumehood.engine_with_parts import Engine
from fumehood.http.answers import envelope_response
from fumehood.http.app import Faces
from fumehood.http.peer import Handover, Shares, make_protocol, most_connections
from fumehood.identity.approvers import FIRST_NAME, had_approver, make_first_approver
from fumehood.observe.log import Logger, flush
from fumehood.protocol.framing import MAX_HEAD_BYTES
from fumehood.protocol.loopback import listen_on
from fumehood.protocol.messages import encode_envelope
from fumehood.storage.database import FILE_NAME, Database, open_database
from fumehood.storage.directory import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    StateError,
    hold_lock,
    private_directory,
)
from fumehood.storage.errors import Standby, StoreError, WriteFailed

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
    """Listen on both sockets, which are passed by systemd or else created here.

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
    """Listen on the configured TCP address. Yield the listening socket in a list, which is empty if
    no address is configured.

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
    """A listening socket for TLS that limits the number of open connections, in total and for each
    address. A connection above a limit is closed immediately.
    """

    def __init__(self, listener: socket.socket, shares: FairShare) -> None:
        # Nothing else counts a TLS connection before its handshake, and each takes 0.3 MB.
        super().__init__(fileno=listener.detach())
        self._shares = shares

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Return it and the peer's address.

        Raises:
            ConnectionAbortedError: the connection exceeded a limit and was closed. asyncio handles
                this exception.
        """
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
    """A connection that calls `on_close` when it is closed."""

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
        StateError: the sockets are not the two expected sockets, or are open to all users.
    """
    # Always removed: a child process must not use them.
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
    """Listen on a Unix socket at `path`, and yield the socket. Only the engine's user can connect
    and, if `group` is given, that group. If there is a socket at the path on which no process
    listens, it is replaced.

    The caller must hold the locks on the state directory and the socket.

    Raises:
        StateError: the path is not a socket, another process listens on it, or the socket cannot be
            created as required.
    """
    # Because of the caller's locks, such a socket can only be left over from an engine that died.
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
        path.unlink(missing_ok=True)  # while the lock is held, no other process listens there
    finally:
        listener.close()


def _group_directory(directory: Path, group: str) -> None:
    """Create `directory` for a group, and let all users pass through its parent directory."""
    _refuse_changeable(directory.parent)
    with _own_directory(directory.parent) as parent:
        os.fchmod(parent, PASSABLE_DIRECTORY)
        with _own_directory(directory) as descriptor:
            _give_to_group(descriptor, directory, group, SHARED_DIRECTORY)


def _refuse_changeable(path: Path) -> None:
    """Raise StateError if another user may write to a directory above `path`, and could so replace
    `path`.
    """
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
    """Open the directory `path`, and yield its descriptor. If it is missing, create it. Raises
    StateError if the directory is a symbolic link, belongs to another user, or cannot be opened.
    """
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        # No links: the caller changes the directory's mode, and the link's owner could choose
        # another.
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


# -- the daemon -----------------------------------------------------------------------------

KEEP_ALIVE_S = 75
LAST_ANSWERS_S = 1
SAME_MESSAGE_S = 1.0
UNFINISHED = "Cancel %s running task(s), timeout graceful shutdown exceeded"
"""uvicorn's log message about requests that did not end in time. *Source*: `Server.shutdown`."""

HANDSHAKE_S = 5.0
"""Maximum seconds for a TLS handshake."""

WATCH_S = 1.0
"""Seconds between two checks whether another engine has become active on the state."""

STANDBY_PAUSE_S = 0.5
"""Seconds between two attempts of a standby to become active."""

STANDBY_RETRY_MS = 1000
"""Delay in milliseconds after which callers of a standby should retry."""

READY = "READY=1"
STOPPING = "STOPPING=1"


async def serve(
    config: Config,
    log: Logger,
    *,
    tools: Iterable[Tool] = (),
    show_credential: Callable[[str], None] | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_draining: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    `on_ready` is called once clients can connect. When the server begins to stop, `on_draining` is
    called with the number of running calls for which it waits. If `show_credential` is given and no
    approver has ever existed, the first approver is created. `show_credential` then receives the
    approver's credential.

    Raises:
        StateError: another engine uses the state directory, another engine has taken over the state
            in the database, or the directory is not private.
        ConfigError: the socket's path is too long, or the TLS certificate or key cannot be used.
    """
    _allow_many_files()
    manager = os.environ.pop("NOTIFY_SOCKET", "")  # removed, so that no child can use it
    with ExitStack() as places:
        places.enter_context(_server_messages_to(log))
        state = private_directory(config.state_directory)
        places.enter_context(hold_lock(state / "engine.lock", "this state directory"))
        context = context_of(config.tls) if config.tls is not None else None
        listeners: Listeners | None = None
        try:
            database = _opened(config, log)
        except Standby:
            listeners = places.enter_context(listening(config))
            on_ready()
            active = await _stand_by(config, log, listeners, manager)
            if active is None:
                return
            database = active
        places.callback(database.close)
        if show_credential is not None and not had_approver(database):
            make_first_approver(database, FIRST_NAME, datetime.now(UTC), show_credential)
        async with Engine(
            tools, config=config, log=log, database=database, tracer_provider="environment"
        ) as engine:
            _warn_where_nobody_can_be_asked(engine)
            # Before anybody can connect, so that no signal is lost after that.
            signals = places.enter_context(
                anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT)
            )
            tcp = places.enter_context(listening_on_tcp(config))
            was_standby = listeners is not None
            listeners = listeners or places.enter_context(listening(config))
            server = _Server(_uvicorn_config(engine, Faces(engine), listeners))
            sockets = [listeners.engine, listeners.control]
            if context is None:
                sockets += tcp
            else:
                most = most_connections()
                # In total, and per address: at least a quarter of the file descriptors stays free.
                shares = FairShare(most * 3 // 2, most // 2)
                server.tls = CountingListener(tcp[0], shares), context
            log.info("daemon.ready", walls=engine.walls)
            async with anyio.create_task_group() as group:
                if config.state.secret_url is not None:
                    group.start_soon(_watch_state, database)
                group.start_soon(_stop_on_signal, signals, server, engine, manager, on_draining)
                # Objects loaded by now live as long as the process: the collector need
                # not traverse them again.
                gc.collect()
                gc.freeze()
                gc.set_threshold(700)  # Python's default, which the command line raised
                if not was_standby:
                    on_ready()
                    tell_manager(manager, READY)
                await server.serve(sockets=sockets)
                group.cancel_scope.cancel()
        log.info("daemon.stopped")
    flush(log)
    if database.is_fenced:
        raise StateError("Another engine has become active on this state. Start this one again.")


def _opened(config: Config, log: Logger) -> Database:
    """Open the configured database with the engine's state. Events of the database, such as failed
    writes, are logged. If another engine takes over the state later, this process sends itself
    SIGTERM.

    Raises the same exceptions as `open_database`.
    """

    def on_event(event: str, values: JsonObject) -> None:
        level = log.info if event == "state.write_works_again" else log.error
        level(event, **values)
        if event == "state.fenced":
            os.kill(os.getpid(), signal.SIGTERM)  # this engine can no longer save anything

    return open_database(config.state_directory / FILE_NAME, on_event, url=config.state.secret_url)


def context_of(tls: TlsSettings) -> ssl.SSLContext:
    """Return a TLS context with the configured certificate and key.

    Raises:
        ConfigError: the certificate or key cannot be used, or every user can read the key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if stat.S_IMODE(tls.key.stat().st_mode) & 0o007:
            raise ConfigError(f"tls.key: every user can read {tls.key}. chmod 640 or 600 it.")
        context.load_cert_chain(tls.cert, tls.key)
    except ssl.SSLError as error:
        why = error.reason or "it is no certificate or key in PEM"
        raise ConfigError(f"tls.cert or tls.key cannot be used: {why}.") from None
    except OSError as error:
        raise ConfigError(f"tls.cert or tls.key cannot be read: {error.strerror}.") from None
    return context


# -- standby --------------------------------------------------------------------------------


async def _stand_by(
    config: Config, log: Logger, listeners: Listeners, manager: str
) -> Database | None:
    """Wait until the engine that uses the state is gone, and take over the state. Until then,
    refuse all requests. Return the opened database with the state. If a signal stops this process
    first, return None.

    `manager` is the address of the service manager.
    """
    found: list[Database] = []
    app = _StandbyApp(Engine(config=config, log=log))
    server = _Server(_uvicorn_config(app.engine, app, listeners))

    async def become_active() -> None:
        told = ""
        while not found:
            await anyio.sleep(STANDBY_PAUSE_S)
            try:
                found.append(await anyio.to_thread.run_sync(_opened, config, log))
            except Standby:
                told = ""
            except StoreError as error:  # such as a rotated audit key, which may be corrected later
                if str(error) != told:
                    told = str(error)
                    log.warning("daemon.standby_cannot_take_over", message=told)
        server.should_exit = True

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:
            group.start_soon(_exit_on_signal, signals, server, app)
            group.start_soon(become_active)
            log.info("daemon.standby")
            tell_manager(manager, READY)
            # Copies of the sockets, because the server closes its own.
            await server.serve(sockets=[listeners.engine.dup(), listeners.control.dup()])
            group.cancel_scope.cancel()
    if app.is_stopping and found:  # the signal came while it became active
        found.pop().close()
    return found[0] if found else None


async def _exit_on_signal(
    signals: AsyncIterator[signal.Signals], server: uvicorn.Server, app: _StandbyApp
) -> None:
    async for _ in signals:
        app.is_stopping = server.should_exit = True


class _StandbyApp:
    """Answers requests to a standby, an engine that waits to take over the state from another
    engine. All requests are refused, except those for health and readiness.

    `engine` is never started, and only makes the envelopes of the refusals.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_stopping = False

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return the coroutine that answers one request."""
        if scope["path"] == "/v1/health":
            response: Response = JSONResponse(Health().model_dump(mode="json"))
        elif scope["path"] == "/v1/ready":
            state = StateReadiness(failing=False, lost_rows=0)
            ready = Readiness(status="standby", walls={}, state=state)
            response = JSONResponse(ready.model_dump(mode="json"), status_code=503)
        else:
            response = envelope_response(self.engine.refusal(_stands_by()))
        return response(scope, receive, send)

    def takes_over(self, path: bytes) -> bool:
        """Return False, so that no connection is handed over to a part. Such requests are refused
        like all others.
        """
        return False

    def hand_over(self, request: Request, upgrade: bytes | None) -> Handover:
        """Raise ShuttingDown. A standby hands no connections over."""
        raise _stands_by()


def _stands_by() -> ShuttingDown:
    why = "This engine stands by: another one is active on the state. Call that one."
    return ShuttingDown(why, retry_after_ms=STANDBY_RETRY_MS)


# -- logs -----------------------------------------------------------------------------------


def _warn_where_nobody_can_be_asked(engine: Engine) -> None:
    """Log a warning if no approver exists, because dangerous calls will then be refused."""
    cure = engine.approvals.remedy_without_approvers()
    if cure is not None:
        told = "Dangerous calls will be refused: there is no approver."
        engine.log.warning("approvers.none", message=told, cure=f"Make an approver: {cure}.")


class _ToLog(logging.Handler):
    """Forwards the log warnings of libraries to the engine's log.

    Warnings from the same source line are forwarded at most once a second.
    """

    def __init__(self, log: Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._last: dict[tuple[str, int], float] = {}
        """Maps a source file and line to the time of the last warning that was forwarded from this
        line."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == UNFINISHED and isinstance(record.args, tuple):
            message = "These requests had not ended in time and were cancelled."
            self._log.warning("daemon.requests_ended", count=record.args[0], message=message)
            return
        # Only the message template, unless its arguments are numbers: text may be a client's.
        are_numbers = isinstance(record.args, tuple) and all(type(n) is int for n in record.args)
        text = record.getMessage() if are_numbers else str(record.msg)
        message = text.splitlines()[0][:200]
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._last.get(place, -math.inf) < SAME_MESSAGE_S:
            return
        self._last[place] = now
        self._log.warning("http.server", message=message)


@contextmanager
def _server_messages_to(log: Logger) -> Iterator[None]:
    handler = _ToLog(log)
    loggers = [logging.getLogger(name) for name in ("uvicorn", "asyncio", "opentelemetry")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling. In addition to uvicorn's sockets, it can listen
    on one socket with TLS.
    """

    tls: tuple[socket.socket, ssl.SSLContext] | None = None
    """The socket for TLS and its TLS context, or None."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets and, if `tls` is set, on the socket for TLS."""
        await super().startup(sockets)
        if self.tls is None:
            return
        listener, context = self.tls
        config = self.config

        def create_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        self.servers.append(
            await asyncio.get_running_loop().create_server(
                create_protocol, sock=listener, ssl=context, ssl_handshake_timeout=HANDSHAKE_S,
                backlog=config.backlog,
            )
        )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # no handlers, so that the process exits with 0 after a graceful stop


async def _watch_state(database: Database) -> None:
    """Return when another engine has taken over the state. This is checked every second."""
    # Without this, an engine that has been replaced would continue to serve, and would not notice
    # changes by the other engine, such as revoked tokens.
    while not database.is_fenced:
        await anyio.sleep(WATCH_S)
        with suppress(WriteFailed):
            await database.check()


async def _stop_on_signal(
    signals: AsyncIterator[signal.Signals],
    server: uvicorn.Server,
    engine: Engine,
    manager: str,
    on_draining: Callable[[int], None],
) -> None:
    """At the first signal, refuse new calls with retryable errors, wait for running calls, and then
    stop the server. At the second signal, stop the server at once.

    `manager` is the address of the service manager. `on_draining` is called at the first signal
    with the number of running calls.
    """
    async with anyio.create_task_group() as group:
        async for number in signals:
            engine.log.info("daemon.stopping", signal=signal.Signals(number).name)
            if engine.is_draining:
                server.force_exit = server.should_exit = True  # a second signal stops at once
                continue
            tell_manager(manager, STOPPING)
            engine.drain()
            on_draining(engine.running_calls)
            group.start_soon(_exit_when_drained, server, engine)


async def _exit_when_drained(server: uvicorn.Server, engine: Engine) -> None:
    with anyio.move_on_after(engine.config.drain_seconds) as waiting:
        await engine.drained()
    # Responses in progress are completed; calls that exceeded the time are ended now.
    server.config.timeout_graceful_shutdown = 0 if waiting.cancelled_caught else LAST_ANSWERS_S
    server.should_exit = True


def _uvicorn_config(
    engine: Engine, app: Faces | _StandbyApp, listeners: Listeners
) -> uvicorn.Config:
    def refusal_body(why: EngineError) -> bytes:
        return encode_envelope(engine.refusal(why))

    return uvicorn.Config(
        app,
        interface="asgi3",
        loop="asyncio",
        http=make_protocol(
            app, refusal_body, listeners.control.getsockname(), Shares(most_connections())
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


def _allow_many_files() -> None:
    """Raise this process's soft limit on open files, because every connection counts as an open
    file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def tell_manager(address: str, state: str) -> None:
    """Send a state, such as `READY=1`, to the service manager. Do not wait for the manager.

    Nothing is sent if `address` is empty, or if no process listens on the address.
    """
    if address[:1] not in ("/", "@"):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(
                state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address
            )
    except OSError:
        pass  # the manager is unreachable; the engine serves without it
