"""The worker process: calls synchronous host functions, one at a time, until it is killed.

`sandbox/host.py` starts this file as `python -P …/worker_main.py FD PID`, where PID is the engine's
process id. The process is not a wall. The functions are the operator's own trusted code, and run
with the engine's environment, import path, working directory and rights. The process exists only so
that a function can be killed. The first frame on FD is `{"path": […]}`, the import path. Each
further frame is a call. The process answers it with frames for the function's progress and the
parts of its result, and then with one reply from `inside`.
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
"""Maximum size of a frame that this process receives, in bytes."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""The `prctl` option that makes a process adopt orphaned descendants. *Source*: `linux/prctl.h`."""


def main() -> None:
    parent = int(sys.argv[2])
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Processes that a function starts and leaves behind stay children of this process, so that they
    # can be found and killed with it.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
    os.dup2(2, 1)  # the engine's stdout carries answers
    sys.path.insert(0, str(Path(__file__).parents[2]))
    _serve(channel)


def _serve(channel: socket.socket) -> None:
    from fumehood.protocol import framing

    lock = threading.Lock()  # threads that the function started may also report progress

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
    """Import the modules that every call needs, before the first call arrives."""
    importlib.import_module("fumehood.registry.declare")
    importlib.import_module("fumehood.executors.inside")


def _answer(message: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    from fumehood.executors.inside import answer
    from fumehood.executors.parts import Parts

    is_over = False

    def report(percent: float, words: str) -> None:
        if not is_over:  # a thread that outlives its call must not report to the next call
            send({"percent": percent, "message": words})

    stream = message.get("stream")
    hear = (lambda text: send({"part": text})) if stream and stream["is_followed"] else None
    try:
        return answer(
            message["module"],
            message["name"],
            message["arguments"],
            pickled=message.get("pickled", ""),
            report=report,
            parts=Parts(stream["max_bytes"], hear) if stream else None,
        )
    except MemoryError:
        return {
            "error": {"kind": "exception", "type": "MemoryError", "message": "", "traceback": []}
        }
    finally:
        is_over = True


if __name__ == "__main__":
    main()
