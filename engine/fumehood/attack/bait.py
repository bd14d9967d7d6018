"""The bait: objects on this host that attacks try to reach, made for one run and removed
afterwards.

Host side. A file, an environment variable and a process carry a secret word that no program
receives. Sockets listen for another word, the knock, which every program has but must not deliver.
Invariants: attacks know only the bait, so they touch nothing else on the host; bait that does not
work from the host itself is an error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil

VARIABLE = "FUMEHOOD_ATTACK_CANARY"
"""The environment variable that holds the secret word."""

KNOCK_BYTES = 32
"""Length of the knock in bytes."""

HEARD_BYTES = 4096
"""Number of bytes at the start of a connection that are searched for the knock, which may be inside
an HTTP request."""

KNOCK_PATIENCE_S = 1.0
"""Seconds to wait for a connection to open, or for the knock to arrive on it."""

LOOPBACK = "127.0.0.1"

STAND_STILL = "import sys; sys.stdin.read()"
"""The program of the bait's process. The process ends when its input is closed, which also happens
when its parent dies."""


class BaitFailed(Exception):
    """The bait (the objects on this host that attacks try to reach) could not be made, so nothing
    was attacked.
    """


class Bait:
    """A context manager that makes the bait of one run and removes it afterwards. The bait consists
    of objects on this host that attacks try to reach: a directory, a process, an environment
    variable and listening sockets.

    The caller must enter the context before it starts the walls. Otherwise, no program could
    inherit the environment variable, even through a faulty wall.
    """

    def __init__(self) -> None:
        self.word = f"word-{secrets.token_hex(12)}"
        self.knock = secrets.token_hex(KNOCK_BYTES // 2)
        self.mark = f"fh{secrets.token_hex(5)}"  # the kernel keeps 15 characters of a name
        """The mark: the name that programs give their processes, so that the host can find them."""
        self.abstract = f"fumehood-attack-{secrets.token_hex(8)}"
        self._stack = contextlib.ExitStack()
        self._heard: list[str] = []

    def __enter__(self) -> Bait:
        try:
            self._lay_out()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # -- what programs receive ------------------------------------------------------------

    def fill(self, code: str) -> str:
        """Return the program `code` with its placeholders replaced by values that the attack needs,
        such as the path of the bait's file and the port of its listener. The secret word in the
        bait, which attacks try to obtain, is not one of these values.
        """
        facts = {
            "@FILE@": str(self.file),
            "@DIRECTORY@": str(self.directory),
            "@PORT@": str(self.port),
            "@ADDRESSES@": repr(self.addresses),
            "@ABSTRACT@": self.abstract,
            "@KNOCK@": self.knock,
            "@PID@": str(self.process.pid),
            "@MARK@": self.mark,
        }
        for name, fact in facts.items():
            code = code.replace(name, fact)
        return code

    # -- checks afterwards ---------------------------------------------------------------------

    def losses(self, answer: str) -> list[str]:
        """Return a description of each loss since the last call of this method. If the bait was
        changed, restore it.

        `answer` is all data that the program returned, as text. A loss is one of these:

        * The bait was changed.
        * `answer` contains the bait's secret word.
        * A listener of the bait received the knock, a word that programs must not be able to
          deliver.
        """
        lost = []
        self._settle()
        heard, self._heard[:] = list(self._heard), []
        lost += [f"it reached the host's listener on {where}" for where in dict.fromkeys(heard)]
        if self.word in answer:
            lost.append("its answer holds the word that only the host knows")
        if self.process.poll() is not None:
            lost.append("the bait's process was ended")
            self._end_process()
            self._start_process()
        if self._listing() != self._laid:
            lost.append("the bait's directory was changed")
            self._fill_directory()
        return lost

    # -- inside -----------------------------------------------------------------------------

    def _lay_out(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fumehood-attack-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        # Readable for every user: the wall must protect it, not its mode.
        self.directory.chmod(0o755)
        self.file = self.directory / "canary"
        self._fill_directory()
        os.environ[VARIABLE] = self.word
        self._stack.callback(os.environ.pop, VARIABLE, None)
        self._start_process()
        self._stack.callback(self._end_process)
        self._listen()

    def _fill_directory(self) -> None:
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.file.write_text(self.word)
        self.file.chmod(0o644)
        (self.directory / "canary.py").write_text(f"WORD = {self.word!r}\n")
        self._laid = self._listing()

    def _listing(self) -> dict[str, bytes | None]:
        return {
            str(path): path.read_bytes() if path.is_file() else None
            for path in sorted(self.directory.rglob("*"))
        }

    def _start_process(self) -> None:
        self.process = subprocess.Popen(  # noqa: S603  # our own interpreter and text
            [sys.executable, "-I", "-S", "-c", STAND_STILL, self.word],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={VARIABLE: self.word},
        )  # fmt: skip

    def _end_process(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _listen(self) -> None:
        """Open the bait's listeners: on loopback, on the host's other addresses, and on an abstract
        socket. A thread records which listeners receive the knock, a word that every program has
        but must not be able to deliver.
        """
        first = socket.create_server((LOOPBACK, 0))
        self.port: int = first.getsockname()[1]
        listeners = {f"{LOOPBACK}:{self.port}": first}
        self.addresses: list[str] = []
        for address in _other_addresses():
            with contextlib.suppress(OSError):
                listeners[f"{address}:{self.port}"] = socket.create_server((address, self.port))
                self.addresses.append(address)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{self.abstract}")
        abstract.listen()
        listeners["an abstract socket"] = abstract  # the last: see `_settle`
        ours, theirs = socket.socketpair()
        ear = threading.Thread(target=self._hear, args=(listeners, theirs), daemon=True)
        ear.start()

        def stop() -> None:
            ours.close()
            ear.join()
            for listener in listeners.values():
                listener.close()
            theirs.close()

        self._stack.callback(stop)
        self._try_out(listeners)

    def _try_out(self, listeners: dict[str, socket.socket]) -> None:
        """Check that each listener of the bait works, by sending it the knock (the word for which
        it listens) from this process.

        Raises:
            BaitFailed: the word did not arrive at a listener.
        """
        # A broken listener would make a wall seem to hold.
        for listener in listeners.values():
            with socket.socket(listener.family) as trial:
                trial.settimeout(KNOCK_PATIENCE_S)
                trial.connect(listener.getsockname())
                trial.sendall(self.knock.encode())
                trial.shutdown(socket.SHUT_WR)
                trial.recv(1)  # the end of the stream, which means that the knock was read
        deaf = set(listeners) - set(self._heard)
        self._heard.clear()
        if deaf:
            raise BaitFailed(f"nothing is heard on {', '.join(sorted(deaf))}")

    def _settle(self) -> None:
        """Wait until all earlier connections are handled. For this, make one more connection, which
        is handled last.
        """
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as last:
            last.settimeout(2 * KNOCK_PATIENCE_S)
            last.connect(f"\0{self.abstract}")
            last.shutdown(socket.SHUT_WR)
            last.recv(1)

    def _hear(self, listeners: dict[str, socket.socket], stop: socket.socket) -> None:
        """Accept connections until the other end of `stop` is closed. Record which listeners
        receive the knock, the word that programs must not be able to deliver. Runs in a thread.
        """
        names = {listener: where for where, listener in listeners.items()}
        while True:
            ready, _, _ = select.select([*names, stop], [], [])
            if stop in ready:
                return
            for listener in ready:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(KNOCK_PATIENCE_S)
                        # Other programs may also connect: only one with the knock counts.
                        if self.knock.encode() in connection.recv(HEARD_BYTES):
                            self._heard.append(names[listener])


def _other_addresses() -> Iterator[str]:
    """Yield the first IPv4 address of each of this host's network interfaces, except loopback
    addresses.
    """
    for addresses in psutil.net_if_addrs().values():
        own = (one.address for one in addresses if one.family == socket.AF_INET)
        yield from islice((one for one in own if not one.startswith("127.")), 1)
