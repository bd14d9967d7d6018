"""How Docker is reached, and why it is not: not installed, not running, not permitted.

Host side. The command line, `doctor` and the tests ask here before they use Docker. Invariant:
only an engine that answered counts; a `docker` program in the path says nothing, because it may
be a client alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import docker
from docker.errors import DockerException
from docker.utils import kwargs_from_env
from requests.exceptions import RequestException

from fumehood.core.errors import SandboxUnavailable

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
DEADLINE_S = 10.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where `dockerd` may be, whatever the caller's own path says."""

SNAP = Path("/snap/bin/docker")
"""There the client comes with an engine."""


class Why(StrEnum):
    """Why no engine can be used."""

    NOT_INSTALLED = "not installed"
    NOT_RUNNING = "not running"
    NOT_PERMITTED = "not permitted"
    NOT_ANSWERING = "not answering"
    WRONG_ADDRESS = "wrong address"


CURES: Mapping[Why, str] = {
    Why.NOT_INSTALLED: "As root on Debian or Ubuntu: scripts/docker-setup, or apt-get install "
    "docker.io; elsewhere see Docker's own instructions.",
    Why.NOT_RUNNING: "As root: systemctl start docker, or without systemd: scripts/docker-setup. "
    "Where DOCKER_HOST is set, see that it names the right one.",
    Why.NOT_PERMITTED: "Run it as a user of the group `docker` (usermod --append --groups docker "
    "USER, then log in anew). Whoever is in that group can become root.",
    Why.NOT_ANSWERING: "See the log of dockerd, and start it anew when it hangs.",
    Why.WRONG_ADDRESS: "Set DOCKER_HOST to unix://PATH or tcp://HOST:PORT, or unset it.",
}


class DockerUnreachable(SandboxUnavailable):
    """No engine that can be used. The message holds no path; `cure` says what to do."""

    def __init__(self, why: Why, found: str) -> None:
        self.why = why
        self.found = found
        self.cure = CURES[why]
        super().__init__(f"{found} {self.cure}")


def docker_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where the engine is to be: `DOCKER_HOST`, or the usual socket where it is not set."""
    return environment.get("DOCKER_HOST") or DEFAULT_ADDRESS


def open_docker(
    environment: Mapping[str, str] = os.environ, *, timeout_s: float = DEADLINE_S
) -> docker.APIClient:
    """A client of an engine that has just answered. `timeout_s` holds for each of its answers.

    Raises:
        DockerUnreachable: with the reason.
    """
    address = docker_address(environment)
    _look(address)
    options = kwargs_from_env(environment=dict(environment))
    options.setdefault("base_url", address)
    try:
        client = docker.APIClient(version="auto", timeout=min(timeout_s, DEADLINE_S), **options)
    except (DockerException, RequestException) as error:
        raise _refused(error) from None
    client.timeout = timeout_s
    return client


def _look(address: str) -> None:
    """Tell what no library tells apart, before one is asked."""
    if address.startswith(("tcp://", "http://", "https://")):
        return
    if not address.startswith("unix://"):
        raise DockerUnreachable(Why.WRONG_ADDRESS, "DOCKER_HOST has a form that is not supported.")
    path = address.removeprefix("unix://")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(DEADLINE_S)
        try:
            probe.connect(path)
        except OSError as error:
            raise _not_connected(error, path) from None


def _not_connected(error: OSError, path: str) -> DockerUnreachable:
    if error.errno in (errno.EACCES, errno.EPERM):
        return DockerUnreachable(
            Why.NOT_PERMITTED, "Docker's socket is there and this user may not open it."
        )
    if isinstance(error, TimeoutError):
        return DockerUnreachable(Why.NOT_ANSWERING, "Docker does not take connections.")
    if error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return DockerUnreachable(
            Why.WRONG_ADDRESS, f"Docker's socket cannot be opened: {error.strerror}."
        )
    if error.errno == errno.ECONNREFUSED or has_dockerd() or f"unix://{path}" != DEFAULT_ADDRESS:
        return DockerUnreachable(Why.NOT_RUNNING, "No Docker engine is running.")
    if shutil.which("docker") is not None:
        return DockerUnreachable(Why.NOT_INSTALLED, "Docker's client is here, without an engine.")
    return DockerUnreachable(Why.NOT_INSTALLED, "Docker is not installed.")


def has_dockerd() -> bool:
    """Whether an engine is installed on this host; it need not run."""
    return shutil.which("dockerd", path=SYSTEM_PATH) is not None or SNAP.exists()


def _refused(error: Exception) -> DockerUnreachable:
    text = str(error)
    if "ermission denied" in text:
        return DockerUnreachable(Why.NOT_PERMITTED, "Docker refuses this user.")
    if "onnection refused" in text:
        return DockerUnreachable(Why.NOT_RUNNING, "No Docker engine is running.")
    return DockerUnreachable(
        Why.NOT_ANSWERING, f"Something answers, and not as Docker does ({type(error).__name__})."
    )
