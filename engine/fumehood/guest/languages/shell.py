"""Shell and JavaScript: replaces the child by bash with one command, or by Node with one program.

Guest side, in the child. After `execute`, nothing of the guest is left in the child's process. Bash
makes no claims; its exit status decides how the run ended. Node runs `javascript.js`, from the same
directory as this file. That script gets the descriptors of the request and reply pipes, and reports
a claim in the same form as a Python program's claim.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from fumehood.guest.container.request import SetUpFailed, memory_file
from fumehood.guest.core.pipes import REPLY_FD

BASH = "/bin/bash"
MAX_ARGUMENT_BYTES = 100 * 1024
"""Size limit of one program argument, in bytes. *Source*: execve(2), MAX_ARG_STRLEN is 128 KB."""

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores. They are reset, because a program would inherit this: `yes | head`
would never end."""


RUN_ARGUMENTS = 'exec -- "$@"'
"""A bash command that runs the program named by bash's arguments. If the program is missing, bash
prints its usual message."""


def become_bash(command: str | None, argv: list[str] | None = None) -> NoReturn:
    """Replace this process by bash with `command`, or by the program and arguments in `argv`.

    Raises:
        OSError: bash is missing, or cannot be executed.
    """
    if command is None:
        execute(BASH, ["bash", "-c", RUN_ARGUMENTS, "bash", *(argv or [])])
    execute(BASH, *arguments_of_bash(command))


def arguments_of_bash(command: str) -> tuple[list[str], tuple[int, ...]]:
    """Return two values: the arguments with which bash runs `command`, and the descriptors that
    bash must inherit. The second value is empty for a short command. A long command is written to
    an anonymous file, whose descriptor bash must inherit.
    """
    if len(command.encode("utf-8")) <= MAX_ARGUMENT_BYTES:
        return ["bash", "-c", "--", command], ()
    script = memory_file("command", command.encode("utf-8"))
    return ["bash", f"/dev/fd/{script}"], (script,)


def execute(program: str, arguments: list[str], keep: tuple[int, ...] = ()) -> NoReturn:
    """Replace this process by another program. The new program inherits the standard streams and
    the descriptors in `keep`.

    Raises:
        OSError: the program is missing, or cannot be executed.
    """
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    os.execvp(program, arguments)  # noqa: S606  # the purpose of this process
    raise AssertionError("unreachable")


NODE = "/usr/bin/node"
COUNTED = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max")
HARNESS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript.js")


def become_node(request: int, memory_bytes: int) -> NoReturn:
    """Replace this process by Node, which waits for its request on the descriptor `request`.
    `memory_bytes` is the memory limit of the run, from which Node's heap limit is computed.

    Raises SetUpFailed if this image has no Node.
    """
    stdin = memory_file("stdin", b"")
    os.dup2(stdin, 0)
    os.close(stdin)
    # A signal ends Node at its own heap limit. If the kernel limits this container's memory, let
    # the kernel's limit take effect first, because then the engine can name the cause. Otherwise,
    # set Node's limit to the run's, or Node could exhaust the memory of the whole container.
    heap_mb = max(64, memory_bytes >> 20) * (2 if any(map(os.path.exists, COUNTED)) else 1)
    arguments = [
        "node", f"--max-old-space-size={heap_mb}", "--no-deprecation", HARNESS,
        str(request), str(REPLY_FD),
    ]  # fmt: skip
    try:
        execute(NODE, arguments, keep=(request, REPLY_FD))
    except FileNotFoundError:
        raise SetUpFailed("there is no Node in this image") from None
