"""A proxy socket between the engine and Docker that a test can hold, cut and reopen."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

DOCKER = "/var/run/docker.sock"
CHUNK_BYTES = 1 << 16


class DockerProxy:
    """Forwards a Unix socket. `hold` simulates a hang, `cut` a crash, `open` the recovery."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._flows = threading.Event()
        self._listener: socket.socket | None = None
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"unix://{self.path}"

    def __enter__(self) -> DockerProxy:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)

    def open(self) -> None:
        """Listen, and forward."""
        self._flows.set()
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self.path))
            self._listener.listen(64)
            self._start(self._accept, self._listener)

    def hold(self) -> None:
        """Accept connections and bytes, and answer nothing."""
        self._flows.clear()

    def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        listener, self._listener = self._listener, None
        self.path.unlink(missing_ok=True)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for end in self._ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._flows.set()

    def _start(self, run: object, *args: socket.socket) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener, suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            with self._lock:
                self._ends |= {near, far}
            try:
                far.connect(DOCKER)
                back = threading.Thread(target=self._forward, args=(far, near), daemon=True)
                back.start()
                self._forward(near, far)
                back.join()
            finally:
                with self._lock:
                    self._ends -= {near, far}

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                self._flows.wait()
                target.sendall(chunk)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
