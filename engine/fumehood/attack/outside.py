"""What the host sees of a program while it runs: its own process table, looked at again and again.

Host side. A program of the corpus gives its processes a name that nobody else's have, so they
are found wherever they are; those of the walls made of processes are found below their guest.
The program's own word is not asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

PAUSE_S = 0.03
GONE_PATIENCE_S = 3.0

SEAL = ("CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Groups")


class Watch:
    """Looks for processes while the block runs, in a thread; a context manager.

    `find` gives the process ids that belong to what is looked at.
    """

    def __init__(self, find: Callable[[], list[int]]) -> None:
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most = 0
        """How many were seen at once."""
        self._sightings: dict[int, list[dict[str, str]]] = {}

    @property
    def seals(self) -> list[dict[str, str]]:
        """What the kernel said last of each that was seen: lines of its status, by name. One that
        was seen once only may just have been made, and is left out.
        """
        return [seen[-1] for seen in self._sightings.values() if len(seen) > 1]

    def settled(self, most: int) -> int:
        """How many there are, as soon as they are at most `most`, or after a while. Blocks."""
        deadline = time.monotonic() + GONE_PATIENCE_S
        while (count := len(self._find())) > most and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return count

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(PAUSE_S):
            found = self._find()
            self.most = max(self.most, len(found))
            for pid in found:
                status = status_of(pid)
                if status:
                    sealed = {name: status.get(name, "") for name in SEAL}
                    self._sightings.setdefault(pid, []).append(sealed)


def named(mark: str) -> list[int]:
    """The processes that gave themselves this name, those left out that are only not reaped yet."""
    return [pid for pid in _pids() if _name(pid) == mark and not _is_zombie(pid)]


def below(pid: int | None) -> list[int]:
    """The descendants of a process, those left out that are only not reaped yet."""
    if pid is None:
        return []
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in children if not _is_zombie(child.pid)]


def is_sealed(seal: dict[str, str]) -> bool:
    """No capability, no way to new ones, behind a filter."""
    nothing = all(set(seal[name]) <= {"0"} for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"))
    return nothing and seal["NoNewPrivs"] == "1" and seal["Seccomp"] == "2"


def status_of(pid: int) -> dict[str, str]:
    """The lines of a process's status; empty where it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _is_zombie(pid: int) -> bool:
    return status_of(pid).get("State", "Z").startswith(("Z", "X"))
