"""The few things that the wall asks of Docker, each with a deadline.

Host side, and dangerous: whoever may speak to Docker is root on its host. Invariant: nothing
that a caller, a tool or a guest says becomes part of a request, but through a `ContainerSpec`;
no file of the host is named, no command is run in a container, nothing is pulled or pushed.

The package `docker` (its low-level client) makes the requests, in threads: it blocks. It is
imported when Docker is first asked for something and something listens there, so an engine
without Docker does not carry it. A deadline that passes leaves at most a thread behind, which
ends with the client's own time limit.

`DOCKER_HOST` may be `unix://…` or `tcp://…`. Encrypted ones (TLS, ssh) are refused: the channel
to a guest is the socket itself, handed to the event loop.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.docker_threads import BoundedThreads

Answer = TypeVar("Answer")

DEFAULT_HOST = "unix:///var/run/docker.sock"
THREADS = 16
CLIENT_TIMEOUT_S = 30
"""After which the client gives up on a silent socket, and an abandoned thread ends."""

QUICK_S = 5.0
"""For questions."""
SLOW_S = 20.0
"""For what makes, starts or removes something: a busy disk may take its time."""

CONNECT_S = 2.0
ATTACH = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
MAX_WORDS = 300


class DockerError(Exception):
    """Docker cannot be used, or did not do what it was asked.

    The text is for the operator: it may hold Docker's own words, with paths of the host.
    """

    public = "Docker did not do what it was asked for."
    """The same for whoever made the call."""
    cure = "Its log and the engine's say more."
    heals = True
    """Whether it may pass without anybody's help, such as a restart."""


class DockerNotInstalled(DockerError):
    """Nothing that could listen is installed."""

    heals = False
    public = "Docker is not installed."
    cure = "Install it (Debian: apt-get install docker.io), or set DOCKER_HOST."


class DockerNotRunning(DockerError):
    """Nobody listens."""

    public = "Docker is not running."
    cure = "Start it (systemctl start docker), or set DOCKER_HOST."


class DockerNotPermitted(DockerError):
    """It listens, but not to this user."""

    heals = False
    public = "Docker may not be used by the engine's user."
    cure = (
        "Let the engine's user into the group docker (who is in it is root on this host), or use "
        "rootless Docker."
    )


class DockerNotSupported(DockerError):
    """It is reached in a way that this engine does not know."""

    heals = False
    public = "Docker cannot be reached in this way."
    cure = "Set DOCKER_HOST to a unix:// or a tcp:// address."


class DockerTimeout(DockerError):
    """It did not answer in time."""

    public = "Docker does not answer in time."


class DockerNotFound(DockerError):
    """There is no such container or image."""


class DockerConflict(DockerError):
    """The name is taken, or the container is just being removed."""


class DockerFault(DockerError):
    """Anything else."""


@dataclass(frozen=True, slots=True)
class Created:
    """A container that was made, and what Docker could not do of what it was asked for."""

    id: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A container as a list of them shows it."""

    id: str
    name: str
    state: str
    labels: Mapping[str, str]


class Docker:
    """One Docker daemon, as `DOCKER_HOST` names it. Making one asks for nothing yet."""

    def __init__(self, environment: Mapping[str, str], *, threads: int = THREADS) -> None:
        self.host = environment.get("DOCKER_HOST") or DEFAULT_HOST
        self._wants_tls = bool(environment.get("DOCKER_TLS_VERIFY"))
        self._threads = BoundedThreads(threads, "docker")
        self._making = threading.Lock()
        self._client: Any = None

    @property
    def is_local(self) -> bool:
        """Whether its host is this one, as far as an address can tell."""
        return self.host.startswith("unix://")

    async def info(self) -> JsonObject:
        """What the daemon says of itself and its host."""
        return await self.ask(lambda client: client.info(), QUICK_S)

    async def create(self, body: JsonObject, name: str) -> Created:
        """Make a container. One that is made too late to be told of still has its name."""
        answer = await self.ask(
            lambda client: client.create_container_from_config(body, name), SLOW_S
        )
        warnings = answer.get("Warnings") or ()
        return Created(str(answer["Id"]), tuple(str(word)[:MAX_WORDS] for word in warnings))

    async def attach(self, container_id: str) -> socket.socket:
        """The three streams of a container as a socket of the caller's, who closes it."""
        return await self.ask(
            lambda client: _attach(client, container_id),
            QUICK_S,
            unwanted=lambda stream: stream.close(),
        )

    async def start(self, container_id: str) -> None:
        """Start a container that was made."""
        await self.ask(lambda client: client.start(container_id), SLOW_S)

    async def state(self, container_id: str) -> JsonObject:
        """`State` of a container: whether it runs, how it ended. Raises DockerNotFound."""
        answer = await self.ask(lambda client: client.inspect_container(container_id), QUICK_S)
        state: JsonObject = answer["State"]
        return state

    async def wait(self, container_id: str, deadline_s: float) -> None:
        """Wait until a container does not run any more."""
        await self.ask(lambda client: client.wait(container_id, timeout=deadline_s), deadline_s)

    async def remove(self, container_id: str) -> None:
        """Kill and remove a container by id or name. One that is gone, or going, is removed."""
        with suppress(DockerNotFound, DockerConflict):
            await self.ask(
                lambda client: client.remove_container(container_id, v=True, force=True), SLOW_S
            )

    async def list(self, label: str) -> list[Listed]:
        """All containers with a label (`name` or `name=value`), running or not."""
        found = await self.ask(
            lambda client: client.containers(all=True, filters={"label": [label]}), QUICK_S
        )
        return [
            Listed(
                str(one["Id"]),
                str((one.get("Names") or ["/"])[0]).lstrip("/"),
                str(one.get("State", "")),
                dict(one.get("Labels") or {}),
            )
            for one in found
        ]

    async def ask(
        self,
        call: Callable[[Any], Answer],
        deadline_s: float,
        *,
        unwanted: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """The answer to a call of the low-level client, made in a thread.

        Raises:
            DockerError: of any kind.
            EngineError: the call's own.
        """

        def ask() -> Answer:
            return call(self._connected())

        try:
            return await self._threads.run(ask, deadline_s, unwanted=unwanted)
        except TimeoutError:
            raise DockerTimeout(f"Docker did not answer within {deadline_s:g} s.") from None
        except (DockerError, EngineError):
            raise
        except Exception as error:
            raise self._typed(error) from None

    def _connected(self) -> Any:
        """The client, made anew after every failure to connect. In a thread."""
        # Each time: the package leaves a socket open where it cannot connect.
        self._look()
        with self._making:
            if self._client is None:
                self._client = _make_client(self.host)
            return self._client

    def _look(self) -> None:
        """Whether anybody listens there at all. Raises DockerError."""
        if self._wants_tls or not self.host.startswith(("unix://", "tcp://", "http://")):
            how = "TLS" if self._wants_tls else self.host.partition("://")[0]
            raise DockerNotSupported(f"Docker over {how} is not supported.")
        if not self.is_local:
            return
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(CONNECT_S)
            trial.connect(self.host.removeprefix("unix://"))

    def _typed(self, error: Exception) -> DockerError:
        """What an exception of the client, or of those below it, means."""
        number = _errno_of(error)
        if number is not None or _is_lost_connection(error):
            self._client = None
        match number:
            case errno.EACCES | errno.EPERM:
                return DockerNotPermitted(f"Docker may not be used by uid {os.geteuid()}.")
            case errno.ENOENT | errno.ECONNREFUSED if self.is_local and not _is_installed():
                return DockerNotInstalled("Docker is not installed.")
            case int():
                return DockerNotRunning(f"Docker is not running: {os.strerror(number)}.")
        return _typed_answer(error)


def _make_client(host: str) -> Any:
    from docker.api.client import APIClient

    class Client(APIClient):  # type: ignore[misc]
        # Neither a proxy nor a password of this user's environment is for Docker. A property:
        # the client speaks to the daemon before its constructor has returned.
        trust_env = property(lambda self: False, lambda self, value: None)

    client = Client(host, version="auto", timeout=CLIENT_TIMEOUT_S)
    # It keeps a connection for each address that it ever asked, and ours hold container ids.
    client.headers["Connection"] = "close"
    return client


def _attach(client: Any, container_id: str) -> socket.socket:
    """Take the stream's descriptor out of the HTTP client's hands: it closes nothing of ours."""
    stream = client.attach_socket(container_id, params=ATTACH)
    try:
        return socket.socket(fileno=stream._sock.detach())
    finally:
        stream._response.close()


def _typed_answer(error: Exception) -> DockerError:
    from docker import errors
    from requests import exceptions

    words = str(getattr(error, "explanation", None) or type(error).__name__)[:MAX_WORDS]
    if isinstance(error, errors.NotFound):
        return DockerNotFound(words)
    if isinstance(error, errors.APIError) and error.status_code == 409:
        return DockerConflict(words)
    if isinstance(error, exceptions.Timeout):
        return DockerTimeout(f"Docker was silent for {CLIENT_TIMEOUT_S} s.")
    if _is_lost_connection(error):
        return DockerNotRunning("Docker broke the connection off.")
    return DockerFault(f"Docker refused: {words}")


def _is_lost_connection(error: Exception) -> bool:
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return True
    from requests import exceptions

    return isinstance(error, exceptions.ConnectionError)


def _errno_of(error: BaseException | None) -> int | None:
    """The number of the first system error that the chain of causes holds, if any."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, OSError) and isinstance(error.errno, int):
            return error.errno
        inner = [part for part in error.args if isinstance(part, BaseException)]
        error = inner[0] if inner else error.__cause__ or error.__context__
        seen += 1
    return None


def _is_installed() -> bool:
    return any(map(shutil.which, ("dockerd", "dockerd-rootless.sh", "podman")))
