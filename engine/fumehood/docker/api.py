"""The runtime Docker: the connection to Docker, the requests of the container wall, and their
errors.

Host side, and dangerous: access to Docker is root access to its host. Invariants: what a caller, a
tool or a guest has sent reaches a request only through a `ContainerSpec`; no request pulls or
pushes an image; the only files of the host that are mounted are the disks of sessions; the only
command that runs in an existing container is the relay to its guest; the event loop never blocks;
every request has a deadline; the number of threads is limited.

The package `docker` (its low-level client) blocks, so its requests run in threads. The package is
imported with the first request to a daemon that is listening, so an engine without Docker never
loads it. If a request hangs, it keeps its thread until the client's own time limit ends it. Other
requests share the remaining threads (`bounded_threads`).

Commands and tests may block, so they use the client itself, which `open_docker` returns. This
function checks that a daemon answers, because an installed `docker` program does not prove that
there is a daemon.

`DOCKER_HOST` may be `unix://…` or `tcp://…`. The engine refuses encrypted connections, because the
channel to a guest is the socket itself, which is passed to the event loop. `open_docker` accepts
TLS.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import anyio

from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.docker.bodies import create_body
from fumehood.docker.host import DEFAULT_SOCKET, may_swap, why_unfit
from fumehood.docker.streams import DockerStreams
from fumehood.sandbox.bounded_threads import Answer, BoundedThreads
from fumehood.sandbox.container.runtime import (
    ContainerState,
    LimitsRefused,
    ListedContainer,
    RuntimeConflict,
    RuntimeFault,
    RuntimeHost,
    RuntimeNotFound,
    RuntimeTimeout,
    RuntimeUnreachable,
)
from fumehood.sandbox.container.spec import ContainerSpec, relay_command
from fumehood.sandbox.wall import HostSize

if TYPE_CHECKING:
    from fumehood.image_store.store import ImageStore
    from fumehood.sandbox.images.catalog import Image

DEFAULT_HOST = f"unix://{DEFAULT_SOCKET}"
THREADS = 16
"""Maximum number of concurrent requests to Docker."""

CLIENT_TIMEOUT_S = 30
"""Seconds without an answer from Docker after which the client gives up, so that the thread of the
request ends.
"""

QUICK_S = 15.0
"""Deadline of queries in seconds. This is enough for a busy host."""

SLOW_S = 20.0
"""Deadline in seconds of requests that make Docker write to its disk. This is enough for a busy
disk.
"""

LAUNCH_S = 25.0
"""Deadline in seconds of the three requests that start a container together. This is enough for a
busy disk.
"""

CONNECT_S = 2.0
"""Maximum seconds to connect to the daemon's socket, to check whether the daemon is listening."""

FREEZE_PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds before each further attempt to freeze a container. With cgroup version 1, Docker's
runtime gives up after a fifth of a second, which is too short for processes that get no CPU time.
"""

OPEN_S = 10.0
"""Seconds that a blocking client waits for each answer, unless the caller of `open_docker` chooses
otherwise.
"""

TRANSFER_S = 600.0
"""Deadline in seconds for saving or loading an image."""

RUNNING_STATES = frozenset({"running", "paused", "restarting"})
"""Docker's states for a container that has not stopped."""

ATTACH = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
"""Parameters of the request that attaches to a container's streams."""


class DockerError(RuntimeFault):
    """Docker cannot be used, or a request to it failed."""

    message = "A request to Docker failed."
    """The text for callers. `Docker.ask` replaces it by one that names the request and the reason.
    """
    reason = ""
    """Why Docker refused a request, in words for callers: the HTTP status, and the cause if it is
    in `KNOWN_CAUSES`.
    """


class DockerUnreachable(DockerError, RuntimeUnreachable):
    """The engine cannot reach a Docker daemon: the address is wrong, no daemon listens there, or
    the engine has no access to it.
    """


class DockerNotRunning(DockerUnreachable):
    """No Docker daemon is listening."""

    message = "Docker is not running."
    remedy = (
        "Install it (Debian: apt-get install docker.io), start it (systemctl start docker), or set "
        "DOCKER_HOST."
    )


class DockerNotPermitted(DockerUnreachable):
    """The engine's user has no access to Docker."""

    heals = False
    message = "This user has no access to Docker."
    remedy = (
        "Add the user to the group docker (its members can become root on this host), or use "
        "rootless Docker."
    )


class DockerNotSupported(DockerUnreachable):
    """`DOCKER_HOST` has an unsupported form."""

    heals = False
    message = "Docker cannot be reached in this way."
    remedy = "Set DOCKER_HOST to a unix:// or a tcp:// address."


class DockerTimeout(DockerError, RuntimeTimeout):
    """Docker did not answer in time."""

    message = "Docker does not answer in time."


class DockerNotFound(DockerError, RuntimeNotFound):
    """The container, image or volume does not exist."""


class DockerConflict(DockerError, RuntimeConflict):
    """A name is already taken, a volume is in use, or the state of a container forbids the
    request.
    """


class DockerWarned(DockerError, LimitsRefused):
    """Docker has created a container with a warning. Such a warning is about a limit that the
    host's operating system cannot enforce, and that Docker therefore ignores.
    """

    message = "Docker cannot apply all limits of a container."


class Docker:
    """The runtime Docker: the daemon at `DOCKER_HOST`. Creating this object does not connect to the
    daemon. `own_images` is the folder with the operator's own image recipes, the files from which
    images are built.
    """

    id = "docker"
    name = "Docker"

    def __init__(self, environment: Mapping[str, str], own_images: Path | None = None) -> None:
        self.host = docker_host(environment)
        self._own_images = own_images
        self._wants_tls = bool(environment.get("DOCKER_TLS_VERIFY"))
        self._threads = BoundedThreads(THREADS, "docker")
        self._making = threading.Lock()
        self._client: Any = None
        self.failure: RuntimeUnreachable | None = None
        """Why the last request did not reach a daemon. None if it reached one."""

    @property
    def is_local(self) -> bool:
        """Whether the address of the daemon is on this host."""
        return self.host.startswith("unix://")

    async def info(self) -> JsonObject:
        """Return Docker's system information, which describes the daemon and its host."""
        return await self.ask("describe itself", lambda client: client.info(), QUICK_S)

    async def examine_host(self, oci_runtime: str | None) -> RuntimeHost:
        """Examine Docker's host. `oci_runtime` is the name of the configured OCI runtime."""
        info = await self.info()
        has_swap = may_swap(is_local=self.is_local)
        return RuntimeHost(
            HostSize(int(info.get("MemTotal") or 0) // MB, int(info.get("NCPU") or 0)),
            why_unfit(info, runtime=oci_runtime, has_swap=has_swap),
        )

    async def launch(self, spec: ContainerSpec) -> tuple[str, DockerStreams]:
        """Create a container, attach to its streams and start it. Return its id and the streams. If
        this method fails, a created container may be left under its name.

        Raises:
            DockerWarned: Docker could not apply a setting; the container was not started.
        """
        body = create_body(spec)
        return await self.ask(
            "start a container",
            lambda client: _launch(client, body, spec.name),
            LAUNCH_S,
            unwanted=lambda launched: launched[1].close(),
        )

    async def take_over(self, name: str, epoch: int) -> DockerStreams:
        """Run, as root in a running container, the relay to its guest. Return the relay's streams.

        Raises:
            DockerNotFound, DockerConflict: the container is gone, or not running.
        """
        return await self.ask(
            "start a program in a container",
            lambda client: _launch_in(client, name, relay_command(epoch)),
            LAUNCH_S,
            unwanted=DockerStreams.close,
        )

    async def inspect(self, container_id: str) -> JsonObject:
        """Return Docker's description of a container. Raises DockerNotFound if it does not
        exist.
        """
        found: JsonObject = await self.ask(
            "describe a container",
            lambda client: client.inspect_container(container_id),
            QUICK_S,
        )
        return found

    async def state(self, name: str) -> ContainerState:
        """Return the state of a container, given its name or id. Raises DockerNotFound if the
        container does not exist.
        """
        found = await self.inspect(name)
        state = found["State"]
        return ContainerState(
            is_running=bool(state.get("Running")),
            is_paused=bool(state.get("Paused")),
            exit_code=state.get("ExitCode"),
            out_of_memory=state.get("OOMKilled") is True,
            pid=int(state.get("Pid") or 0),
            image_id=str(found.get("Image", "")),
            oci_runtime=str(found["HostConfig"].get("Runtime", "")),
            labels=found["Config"]["Labels"] or {},
        )

    async def pause(self, container_id: str) -> None:
        """Freeze all processes of a container. Do nothing if they are already frozen.

        Raises:
            DockerNotFound: the container is gone.
        """
        for pause_s in (*FREEZE_PAUSES_S, None):
            try:
                with suppress(DockerConflict):
                    await self.ask(
                        "pause a container", lambda client: client.pause(container_id), QUICK_S
                    )
                return
            except DockerError as error:
                if pause_s is None or type(error) is not DockerError:
                    raise
                await anyio.sleep(pause_s)

    async def unpause(self, container_id: str) -> None:
        """Thaw all processes of a container. Do nothing if they are not frozen.

        Raises:
            DockerNotFound: the container is gone.
        """
        try:
            await self.ask(
                "continue a container", lambda client: client.unpause(container_id), QUICK_S
            )
        except DockerError:
            if (await self.state(container_id)).is_paused:
                raise

    async def attach_disk(self, name: str, device: str) -> None:
        """Create a volume with the name of the disk, which Docker mounts from the block device
        `device`.
        """
        options = {"type": "ext4", "device": device, "o": "nosuid,nodev,noatime"}
        await self.ask(
            "create a volume",
            lambda client: client.create_volume(name, driver="local", driver_opts=options),
            SLOW_S,
        )

    async def detach_disk(self, name: str) -> None:
        """Remove the volume of a disk. Do nothing if it does not exist.

        Raises:
            DockerConflict: a container uses the volume.
        """
        with suppress(DockerNotFound):
            await self.ask("remove a volume", lambda client: client.remove_volume(name), SLOW_S)

    async def remove(self, container_id: str) -> None:
        """Kill and remove the container with this id or name. Do nothing if the container does not
        exist or is already being removed.
        """
        with suppress(DockerNotFound, DockerConflict):
            await self.ask(
                "remove a container",
                lambda client: client.remove_container(container_id, v=True, force=True),
                SLOW_S,
            )

    async def list(self, label: str) -> list[ListedContainer]:
        """Return all containers that have the label `label` (`name` or `name=value`), including
        stopped containers.
        """
        found = await self.ask(
            "list containers",
            lambda client: client.containers(all=True, filters={"label": [label]}),
            QUICK_S,
        )
        return [
            ListedContainer(
                str(one["Id"]),
                str((one.get("Names") or ["/"])[0]).lstrip("/"),
                one.get("State", "") not in RUNNING_STATES,
                dict(one.get("Labels") or {}),
            )
            for one in found
        ]

    # `docker.store` is imported late, because it loads Docker's package, which an engine without
    # Docker must not.

    async def find_image(self, name: str) -> Image:
        """Return the newest current image with this name. Raises ImageMissing if it is missing."""
        from fumehood.docker.store import DockerStore
        from fumehood.image_store.find import find_image

        own = self._own_images
        return await self.ask(
            "find an image", lambda client: find_image(DockerStore(client), name, own=own), QUICK_S
        )

    async def find_layer(self, base: str, lock: str) -> str | None:
        """Return the id of the image that adds to the image with the id `base` what `lock` names,
        or None if it does not exist.
        """
        from fumehood.docker.store import DockerStore
        from fumehood.image_store.find import find_layer

        return await self.ask(
            "find an image", lambda client: find_layer(DockerStore(client), base, lock), QUICK_S
        )

    def open_store(self) -> ImageStore:
        """Connect to the daemon, and return the store of its images. Blocks.

        Raises:
            DockerError: Docker cannot be used.
        """
        from fumehood.docker.store import open_store

        return open_store()

    async def save_image(self, image_id: str, file: IO[bytes]) -> None:
        """Write an image and its tag to `file`, from which another daemon can load them."""

        await self.ask(
            "save an image", lambda client: save_image(client, image_id, file), TRANSFER_S
        )

    async def load_image(self, file: IO[bytes]) -> None:
        """Load an image from a file that `save_image` has written."""
        await self.ask("load an image", lambda client: load_image(client, file), TRANSFER_S)

    async def ask(
        self,
        asked: str,
        call: Callable[[Any], Answer],
        deadline_s: float,
        *,
        unwanted: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Run `call` in a thread with the low-level client, and return its result. `asked`
        completes the sentence "Docker did not …" in errors, for example "create a volume". If the
        result arrives after the deadline, it is passed to `unwanted`.

        Raises:
            DockerError: Docker cannot be used, or the request failed.
            EngineError: `call` itself raised it.
        """

        def ask() -> Answer:
            return call(self._connected())

        failure = None
        try:
            return await self._threads.run(ask, deadline_s, unwanted=unwanted)
        except TimeoutError:
            late = DockerTimeout(f"Docker did not {asked} within {deadline_s:g} s.")
            late.message = str(late)
            raise late from None
        except EngineError:
            raise
        except Exception as error:
            typed = _typed(error)
            if isinstance(typed, DockerUnreachable):
                self._client, failure = None, typed
            elif typed.reason:
                typed.message = f"Docker did not {asked}: {typed.reason}."
            raise typed from None
        finally:
            self.failure = failure

    def _connected(self) -> Any:
        """Return the low-level client. If the last connection failed, create a new client first.
        Call this method only in a thread, because it blocks.
        """
        if self._wants_tls or self.host.startswith("https://"):
            raise DockerNotSupported("Docker over TLS is not supported.")
        # Check each time: the package leaks a socket if it cannot connect.
        _check_listening(self.host, CONNECT_S)
        with self._making:
            if self._client is None:
                self._client = _make_client(self.host, CLIENT_TIMEOUT_S)
                # The client keeps a connection for each URL, and our URLs contain container ids.
                self._client.headers["Connection"] = "close"
            return self._client


# -- reaching Docker -----------------------------------------------------------------------


def docker_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the Docker daemon. It is `DOCKER_HOST` of the environment variables or,
    if that is not set, Docker's default socket.
    """
    return environment.get("DOCKER_HOST") or DEFAULT_HOST


def open_docker(environment: Mapping[str, str] = os.environ, *, timeout_s: float = OPEN_S) -> Any:
    """Return a blocking client for the Docker daemon, after checking that the daemon answers. The
    client waits at most `timeout_s` seconds for each answer.

    Raises:
        DockerError: Docker cannot be used.
    """
    host = docker_host(environment)
    try:
        _check_listening(host, OPEN_S)
        from docker.utils import kwargs_from_env

        tls = kwargs_from_env(environment=dict(environment))
        client = _make_client(tls.pop("base_url", host), min(timeout_s, OPEN_S), **tls)
    except Exception as error:
        raise _typed(error) from None
    client.timeout = timeout_s
    return client


@contextmanager
def typed_errors() -> Iterator[None]:
    """Convert exceptions of a blocking client that are raised in the block to DockerError."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise _typed(error) from None


def _check_listening(host: str, deadline_s: float) -> None:
    """Raise OSError or DockerError if no daemon is listening at the address `host`."""
    if host.startswith(("tcp://", "http://", "https://")):
        return
    if not host.startswith("unix://"):
        raise DockerNotSupported("DOCKER_HOST has an unsupported form.")
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(deadline_s)
        trial.connect(host.removeprefix("unix://"))


def _make_client(host: str, timeout_s: float, **tls: Any) -> Any:
    from docker.api.client import APIClient

    class Client(APIClient):  # type: ignore[misc]
        # Ignore proxies and passwords in this user's environment. This is a property, because the
        # client connects to the daemon before its constructor has returned.
        trust_env = property(lambda self: False, lambda self, value: None)

    return Client(host, version="auto", timeout=timeout_s, **tls)


def save_image(client: Any, image_id: str, file: IO[bytes]) -> None:
    """Write an image and its tag to `file`."""
    tags = client.inspect_image(image_id).get("RepoTags") or [image_id]
    file.writelines(client.get_image(tags[0]))


def load_image(client: Any, file: IO[bytes]) -> None:
    """Load images from a file that `save_image` has written. Raises RuntimeFault if Docker refuses
    the file.
    """
    for said in client.load_image(file):
        if "error" in said:
            raise DockerError(str(said["error"])[:500])


def new_docker(own_images: Path) -> Docker:
    """Create the runtime of a container wall, from the variables of this process. `own_images` is
    the folder of the image recipes that the operator wrote.
    """
    return Docker(os.environ, own_images)


def _launch(client: Any, body: JsonObject, name: str) -> tuple[str, DockerStreams]:
    created = client.create_container_from_config(body, name)
    if created.get("Warnings"):
        raise DockerWarned("; ".join(map(str, created["Warnings"])))
    stream, _ = _detached(client.attach_socket(created["Id"], params=ATTACH))
    try:
        client.start(created["Id"])
    except BaseException:
        stream.close()
        raise
    return str(created["Id"]), DockerStreams(stream)


def _launch_in(client: Any, container_id: str, command: tuple[str, ...]) -> DockerStreams:
    made = client.exec_create(container_id, list(command), stdin=True, user="0:0")
    return DockerStreams(*_detached(client.exec_start(made["Id"], socket=True)))


def _detached(attached: Any) -> tuple[socket.socket, bytes]:
    """Take the socket of an attached stream from the HTTP client, because the client would
    otherwise close the socket. Return the socket, and those bytes of the stream that the client has
    already read together with the headers of the response.
    """
    try:
        attached._sock.setblocking(False)
        begun = attached._response.raw._fp.fp.read1() or b""
        return socket.socket(fileno=attached._sock.detach()), begun
    finally:
        attached._response.close()


def _typed(error: Exception) -> DockerError:
    """Convert an exception of the client, or of the libraries that the client uses, to a
    DockerError.
    """
    if isinstance(error, DockerError):
        return error
    number = next(
        (
            one.errno
            for one in _causes(error)
            if isinstance(one, OSError) and isinstance(one.errno, int)
        ),
        None,
    )
    match number:
        case errno.EACCES | errno.EPERM:
            return DockerNotPermitted(f"Docker does not let uid {os.geteuid()} use it.")
        case int():
            return DockerNotRunning(f"Docker is not running: {os.strerror(number)}.")
    if isinstance(error, TimeoutError):
        return DockerTimeout("Docker does not accept connections.")
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return DockerNotRunning("Docker broke the connection off.")
    return _typed_answer(error)


def _typed_answer(error: Exception) -> DockerError:
    from docker import errors
    from requests import exceptions

    words = str(getattr(error, "explanation", None) or type(error).__name__)
    if any(isinstance(one, exceptions.Timeout) for one in _causes(error)):
        return DockerTimeout("Docker was silent for too long.")
    if isinstance(error, exceptions.ConnectionError):
        return DockerNotRunning("Docker broke the connection off.")
    if isinstance(error, errors.NotFound):
        typed: DockerError = DockerNotFound(words)
    elif isinstance(error, errors.APIError) and error.status_code == 409:
        typed = DockerConflict(words)
    else:
        typed = DockerError(f"Docker refused: {words}")
    status = getattr(error, "status_code", None)
    said = (
        f"it answered with status {status}" if status else f"{type(error).__name__} in the client"
    )
    cause = _known_cause(words)
    typed.reason = f"{said}, {cause}" if cause else said
    return typed


KNOWN_CAUSES = frozenset(
    {os.strerror(number).lower() for number in errno.errorcode}
    | {"context canceled", "context deadline exceeded", "signal: killed", "unexpected eof"}
)
"""Causes in Docker's explanations of failures that callers may read, because they reveal nothing
about the host. They are the texts of system call errors, and of some errors in Go's libraries.
"""


def _known_cause(words: str) -> str | None:
    """Return the innermost known cause that Docker's explanation `words` contains. It is one of the
    `KNOWN_CAUSES`. If the explanation contains none of them, return None.
    """
    # An explanation begins with the outermost failure, so the last cause is the innermost.
    words = words.lower()
    found = [(words.rfind(cause) + len(cause), cause) for cause in KNOWN_CAUSES if cause in words]
    return max(found, key=lambda one: (one[0], len(one[1])), default=(0, None))[1]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        inner = [part for part in error.args if isinstance(part, BaseException)]
        error = inner[0] if inner else error.__cause__ or error.__context__
