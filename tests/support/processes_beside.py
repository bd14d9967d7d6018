"""Registered processes of one container: requests, and a look from outside at what runs in it."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio

from fumehood.direct.ask import launcher_directory, sandboxes_of
from fumehood.docker.api import open_docker
from fumehood.processes.arguments import checked
from support.one_container import OneContainer

WAIT_S = 120.0


async def ask(box: OneContainer, do: str, name: str | None = None, **more: Any) -> Any:
    """The answer to a request about processes."""
    request = {"do": do, **({"name": name} if name is not None else {}), **more}
    answer = await box.container.processes.ask(checked(request))
    (part,) = answer.values()
    return part


async def start(box: OneContainer, name: str, command: str) -> None:
    """Start a shell command as a registered process."""
    assert (await ask(box, "start", name, command=command))["state"] == "running"


async def state_of(box: OneContainer, name: str) -> dict[str, Any]:
    (found,) = [one for one in await ask(box, "list") if one["name"] == name]
    return dict(found)


async def until_ended(box: OneContainer, name: str) -> dict[str, Any]:
    """The state of a process, once it has ended."""
    with anyio.fail_after(WAIT_S):
        while (shown := await state_of(box, name))["state"] != "ended":
            await anyio.sleep(0.02)
    return shown


async def until_printed(box: OneContainer, name: str, text: str) -> str:
    """All output of a process, once it contains a text."""
    printed, offset = "", 0
    with anyio.fail_after(WAIT_S):
        while text not in printed:
            piece = await ask(box, "read", name, after=offset)
            printed, offset = printed + piece["text"], piece["offset"]
            await anyio.sleep(0.01)
    return printed


LIST = "for one in /proc/[0-9]*; do tr '\\0' ' ' < $one/cmdline; echo; done"


OVER = "over-5c1d\n"
"""Ends the output of a command. On a busy host, Docker sometimes returns less than was printed, and
a test that counts processes must not take this for a container without any."""


JOIN = 'while [ "$1" != nsenter ]; do echo $$ >"$1"; shift; done; exec "$@"'
"""Runs a command in control groups, as Docker does: the guest compares how many processes it sees
with how many its group has, and one outside the group would hide one of the program's."""


def _groups_of(pid: int) -> list[str]:
    """The files through which a process joins the control groups of another, of both versions."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    parts = [line.split(":", 2)[1:] for line in lines]
    found = [Path(f"/sys/fs/cgroup/{names}{path}/cgroup.procs") for names, path in parts]
    return [str(one) for one in found if one.exists()]


def in_container(box: OneContainer, command: str) -> str:
    """The output of a shell command that root runs in a container, from outside."""
    shell = ["/bin/sh", "-c", f"{command}\nprintf {OVER!r}"]
    for one in sandboxes_of(launcher_directory()):
        if one["name"] == box.name:
            enter = ["nsenter", "--target", str(one["pid"]), "--user", "--mount", "--pid"]
            join = ["sh", "-c", JOIN, "sh", *_groups_of(one["pid"])]
            return subprocess.run(
                [*join, *enter, *shell], capture_output=True, text=True, errors="replace",
                check=True,
            ).stdout.removesuffix(OVER)  # fmt: skip
    with closing(open_docker(timeout_s=30)) as client:
        for _ in range(5):
            made = client.exec_create(box.name, shell, stderr=False, user="0")
            printed = str(client.exec_start(made["Id"]).decode("utf-8", "replace"))
            if printed.endswith(OVER):
                return printed.removesuffix(OVER)
    raise AssertionError(f"Docker returned incomplete output, the last time {printed!r}")


def count_of(box: OneContainer, command: str) -> int:
    """How many processes of a container have a command line that begins so. They are seen by a
    process of root in it, because Docker itself does not see those of gVisor.
    """
    return sum(one.startswith(command) for one in in_container(box, LIST).splitlines())


async def until_counted(box: OneContainer, command: str, number: int) -> None:
    """Wait until so many processes have a command line that begins so: a fork has none of its own
    before it has become its program.
    """
    with anyio.fail_after(WAIT_S):
        while await anyio.to_thread.run_sync(count_of, box, command) != number:
            await anyio.sleep(0.02)
