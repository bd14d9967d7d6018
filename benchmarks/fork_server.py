"""The floor of a restricted program: a fork server that runs it bare, with no sandbox.

`python -m benchmarks.fork_server FD`: preloads the modules that programs may import,
then forks a child for each request on the socket FD, which compiles and executes the text
and sends its last value back as JSON. No limits, no seal, no tables, no guards.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEADER = struct.Struct("!I")
MODULES = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap",
)  # fmt: skip


def serve(connection: socket.socket) -> None:
    for name in MODULES:
        __import__(name)
    while head := connection.recv(HEADER.size, socket.MSG_WAITALL):
        body = connection.recv(HEADER.unpack(head)[0], socket.MSG_WAITALL)
        answer, to_parent = os.pipe()
        pid = os.fork()
        if pid == 0:
            namespace: dict[str, object] = {}
            exec(compile(body.decode(), "<code>", "exec"), namespace)
            os.write(to_parent, json.dumps({"value": namespace["value"]}).encode())
            os._exit(0)
        os.close(to_parent)
        reply = os.read(answer, 1 << 16)
        os.close(answer)
        os.waitpid(pid, 0)
        connection.sendall(HEADER.pack(len(reply)) + reply)


@contextmanager
def bare_fork_server() -> Iterator[Callable[[str], bytes]]:
    """A running server, and the function that asks it: text in, JSON out."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.fork_server", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()

    def ask(code: str) -> bytes:
        body = code.encode()
        ours.sendall(HEADER.pack(len(body)) + body)
        head = ours.recv(HEADER.size, socket.MSG_WAITALL)
        return ours.recv(HEADER.unpack(head)[0], socket.MSG_WAITALL)

    try:
        yield ask
    finally:
        ours.close()
        process.wait(timeout=30)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
