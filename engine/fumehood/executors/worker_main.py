"""The worker process: calls synchronous host functions, one at a time, until it is killed.

Started by `sandbox/host.py`, which finds it by path, as `python -P …/worker_main.py FD PID`. It is
no wall: the functions are the operator's own trusted code, run with the environment, the import
path, the working directory and the rights of the engine. It exists so that they can be killed. The
first frame on FD is `{"path": […]}`, each further one a call, each answered by what it reports of
its progress and then one reply of `inside`.
"""

import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_FRAME_BYTES = 16 << 20
MAX_RESULT_DEPTH = 58
"""Slightly below the host's limit: a result is nested in a reply."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    parent = int(sys.argv[2])
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # What a function starts and leaves behind stays below this process, and dies with it.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
    os.dup2(2, 1)  # the engine's stdout carries answers
    sys.path.insert(0, str(Path(__file__).parents[2]))
    _serve(channel)


def _serve(channel: socket.socket) -> None:
    from fumehood.protocol import framing

    lock = threading.Lock()  # a function's own threads may report, too

    def send(frame: dict[str, Any]) -> None:
        with lock:
            channel.sendall(framing.encode(frame))

    decoder = framing.Decoder(MAX_FRAME_BYTES)
    first = True
    while chunk := channel.recv(1 << 16):
        for message in decoder.feed(chunk):
            if first:
                sys.path[:] = message["path"]
                _load()
            reply = {"ready": True} if first else _answer(message, send)
            first = False
            send(reply)


def _load() -> None:
    """What every call needs, before anybody waits for one."""
    importlib.import_module("fumehood.registry.declare")
    importlib.import_module("fumehood.executors.inside")


def _answer(message: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    from fumehood.executors.inside import answer
    from fumehood.executors.parts import Parts

    is_over = False

    def report(percent: float, words: str) -> None:
        if not is_over:  # a thread that is left over reports to nobody
            send({"percent": percent, "message": words})

    stream = message.get("stream")
    hear = (lambda text: send({"part": text})) if stream and stream["is_followed"] else None
    try:
        return answer(
            message["module"],
            message["name"],
            message["arguments"],
            pickled=message.get("pickled", ""),
            max_depth=MAX_RESULT_DEPTH,
            report=report,
            parts=Parts(stream["max_bytes"], MAX_RESULT_DEPTH, hear) if stream else None,
        )
    except MemoryError:
        return {
            "error": {"kind": "exception", "type": "MemoryError", "message": "", "traceback": []}
        }
    finally:
        is_over = True


if __name__ == "__main__":
    main()
