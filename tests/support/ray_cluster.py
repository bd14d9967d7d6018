"""A Ray cluster on loopback, made of `fumehood node` processes, each as if on a machine of its own."""

from __future__ import annotations

import platform
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from support.containers import remove_containers_of
from support.wait import wait_until
from tests.conftest import CLEAN_ENVIRONMENT, FUMEHOOD

START_S = 60.0

IP = "127.0.0.2"
"""On loopback; Ray replaces 127.0.0.1 by the machine's address."""


class Cluster:
    """The head, which is no node unless it has slots, and nodes."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str] | None = None, head_slots: int = 0
    ) -> None:
        self.directory = directory
        with socket.socket() as probe:
            probe.bind((IP, 0))
            self.port = probe.getsockname()[1]
        self.environment = {
            "HOME": str(directory),  # where the head makes the token
            "RAY_TMPDIR": str(directory),
            "FUMEHOOD_NODE_HOME": str(directory / "nodes"),
            **(environment or {}),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.head = self.start("--head", "--port", str(self.port), "--slots", str(head_slots))

    @property
    def address(self) -> str:
        return f"{IP}:{self.port}"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def add(self, slots: int = 2) -> subprocess.Popen[bytes]:
        return self.start("--address", self.address, "--slots", str(slots))

    def start(self, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            before = log.tell()
            process = subprocess.Popen(
                [str(FUMEHOOD), "node", "--ip", IP, *options], env={**CLEAN_ENVIRONMENT, **self.environment, **variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        wait_until(
            lambda: "Ray runtime started" in self.log[before:] or process.poll() is not None,
            START_S,
        )
        assert process.poll() is None, self.log[before:]
        return process

    def nodes_by_name(self) -> dict[str, subprocess.Popen[bytes]]:
        """The nodes by their names. Each has locked its directory."""
        found = {}
        for path in sorted((self.directory / "nodes").glob("node-*/node.lock")):
            number = path.parent.name.removeprefix("node-")
            name = platform.node() if number == "0" else f"{platform.node()}-{number}"
            for process in self.processes:
                children = psutil.Process(process.pid).children(recursive=True)
                if any(_has_open(child, path) for child in children):
                    found[name] = process
        return found

    def actor_of(self, process: subprocess.Popen[bytes]) -> psutil.Process:
        """The process of a machine that holds its sandboxes."""
        children = psutil.Process(process.pid).children(recursive=True)
        return next(one for one in children if "NodeActor" in " ".join(one.cmdline()))

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a machine with all its processes at once."""
        with suppress(psutil.NoSuchProcess):
            for one in [*psutil.Process(process.pid).children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
        process.kill()
        process.wait(timeout=600)
        self.processes.remove(process)

    def close(self) -> None:
        for process in list(self.processes):
            self.kill(process)


def _has_open(process: psutil.Process, path: Path) -> bool:
    with suppress(psutil.Error):
        return any(file.path == str(path) for file in process.open_files())
    return False


@contextmanager
def running_cluster(
    nodes: int,
    slots: int = 2,
    environment: Mapping[str, str] | None = None,
    *,
    head_slots: int = 0,
) -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    directory.chmod(0o700)
    cluster = Cluster(directory, environment, head_slots)
    try:
        for _ in range(nodes):
            cluster.add(slots)
        yield cluster
    finally:
        cluster.close()
        remove_containers_of(directory)
        shutil.rmtree(directory, ignore_errors=True)
