"""JavaScript: become Node with one program, run by `javascript.js` beside this file.

Guest side, in the child. What that script tells at the end is a claim, in the same form as that of
a Python program; it finds the request and the way to tell on two descriptors.
"""

from __future__ import annotations

import os
from typing import NoReturn

from fumehood.guest.container.request import SetUpFailed, memory_file
from fumehood.guest.core.pipes import REPLY_FD
from fumehood.guest.languages.shell import become

NODE = "/usr/bin/node"
COUNTED = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max")
HARNESS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript.js")


def become_node(request: int, memory_bytes: int) -> NoReturn:
    """`request` is the descriptor to read one from, now or when there is one.

    Raises SetUpFailed where there is no Node here.
    """
    stdin = memory_file("stdin", b"")
    os.dup2(stdin, 0)
    os.close(stdin)
    # Its own limit would end it with a signal. Where the kernel counts this container's memory,
    # that limit comes first, and is named; elsewhere it would take the whole container with it.
    heap_mb = max(64, memory_bytes >> 20) * (2 if any(map(os.path.exists, COUNTED)) else 1)
    arguments = [
        "node", f"--max-old-space-size={heap_mb}", "--no-deprecation", HARNESS,
        str(request), str(REPLY_FD),
    ]  # fmt: skip
    try:
        become(NODE, arguments, keep=(request, REPLY_FD))
    except FileNotFoundError:
        raise SetUpFailed("there is no Node in this image") from None
