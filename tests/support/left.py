"""What the engines of a test session have left on the machine at its end.

Other test sessions and engines may run beside it. A container is this session's if its engine was
this process or one that it had started, as the container's label and the time of its creation show;
a disk, if its file was in a directory that this process had made.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from docker.errors import APIError

from fumehood.docker.api import DockerError, open_docker
from fumehood.sandbox.container.spec import LABEL_PID
from support.containers import loop_devices

LATE_S = 30
"""Docker makes a container after it was asked for, and its engine may have been killed meanwhile."""


@dataclass
class Process:
    """A process that may be an engine, and the test that has started it."""

    pid: int
    began_s: int
    test: str
    ended_s: float = float("inf")


@dataclass
class Made:
    """What was made in this process."""

    processes: list[Process] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)

    def watch(self, put: Callable[[Any, str, Any], None]) -> None:
        """Note what is made from now on. `put` sets an attribute."""
        self.processes.append(Process(os.getpid(), int(time.time()), "in this process"))
        put(subprocess, "Popen", _noting(subprocess.Popen, self.processes))
        make = tempfile.mkdtemp

        def noted(*given: Any, **named: Any) -> Any:
            made = make(*given, **named)
            self.directories.append(os.fspath(made))
            return made

        put(tempfile, "mkdtemp", noted)

    def left(self) -> Iterator[str]:
        """The containers and loop devices that are there now."""
        try:
            client = open_docker(timeout_s=30)
        except DockerError:  # this host has none
            return
        with closing(client):
            for one in client.containers(all=True, filters={"label": [LABEL_PID]}):
                for process in self.processes:
                    until_s = process.ended_s + LATE_S
                    is_its = one["Labels"][LABEL_PID] == str(process.pid)
                    if not (is_its and process.began_s <= one["Created"] <= until_s):
                        continue
                    if one["State"] == "exited":
                        # A stopping engine waits for Docker for some seconds only. What has exited
                        # by then a later engine of its state removes; a test's has none.
                        with suppress(APIError):
                            client.remove_container(one["Id"], v=True, force=True)
                    else:
                        made = time.strftime("%H:%M:%S", time.gmtime(one["Created"]))
                        yield f"container {one['Names'][0]} of {made}: {process.test}"
        for device, file in loop_devices():
            if any(map(file.is_relative_to, self.directories)):
                yield f"{device} of {file}"


def _noting(popen: type[subprocess.Popen[Any]], processes: list[Process]) -> type[Any]:
    """`subprocess.Popen`, which notes its processes."""

    class Popen(popen):  # type: ignore[misc, valid-type]
        _noted: Process | None = None

        def _execute_child(self, *given: Any) -> None:
            began_s = int(time.time())
            super()._execute_child(*given)
            test = os.environ.get("PYTEST_CURRENT_TEST", "of no test")
            self._noted = Process(self.pid, began_s, test)
            processes.append(self._noted)

        @property
        def returncode(self) -> Any:
            return self._code

        @returncode.setter
        def returncode(self, code: Any) -> None:  # by `wait`, `poll` and asyncio
            self._code = code
            if code is not None and self._noted is not None:
                self._noted.ended_s = time.time()

    return Popen
