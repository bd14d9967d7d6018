"""The control groups (cgroups) of sandboxes, version 1 or version 2.

Host side, standard library only; used by the launcher. Each sandbox has one group. All groups of
one launcher have a common parent, whose share of the processors grows with the number of sandboxes,
so that a sandbox counts like a process of the host. Invariant: a group is returned only if all its
limits were set.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, field

ROOT = "/sys/fs/cgroup"
NEEDED = ("memory", "pids", "cpu")
"""The controllers without which no sandbox starts."""

WANTED = (*NEEDED, "cpuacct", "freezer")
"""The controllers of version 1 that a sandbox uses."""

SHOWN = ("memory", "pids", "cpuacct")
"""The controllers of version 1 whose counters the guest reads."""

PERIOD_US = 100_000
"""Period of the limit on processors, in microseconds."""

REMOVE_S = 1.0
"""Maximum seconds until the operating system has noticed that a group is empty."""

FREEZE_S = 5.0
"""Maximum seconds until all processes of a group are frozen."""

NONE = 0
"""The version on a host whose control groups this user cannot make."""

SHARES = {1: ("cpu.shares", 1024, 262_144), 2: ("cpu.weight", 100, 10_000)}
"""Version of cgroups → the file with a group's share of the processors, the share of one process
group, and the maximum.
"""


class NotLimited(Exception):
    """A limit cannot be set on this host. The message says which, and why."""


@dataclass
class Group:
    """The control group of one sandbox. `paths` maps each controller to a directory. In version 2,
    the directories are the same. Without control groups (`NONE`), it is empty.
    """

    version: int
    paths: dict[str, str] = field(default_factory=dict)

    def write(self, controller: str, file: str, value: object) -> None:
        """Write to a file of a controller. Raises OSError."""
        with open(f"{self.paths[controller]}/{file}", "w", encoding="ascii") as opened:
            opened.write(str(value))

    def read(self, controller: str, file: str) -> str:
        """Read a file of a controller. Return "" if it cannot be read."""
        try:
            with open(f"{self.paths[controller]}/{file}", encoding="ascii") as opened:
                return opened.read()
        except (OSError, KeyError):
            return ""

    def join(self) -> None:
        """Move the calling process into the group. Raises OSError."""
        for path in sorted(set(self.paths.values())):
            with open(f"{path}/cgroup.procs", "w", encoding="ascii") as opened:
                opened.write(str(os.getpid()))

    def shown(self) -> dict[str, str]:
        """Return the directories that the sandbox sees, by their place in its /sys/fs/cgroup."""
        if self.version == 2:
            return {"": self.paths["memory"]}
        return {name: self.paths[name] for name in SHOWN if name in self.paths}

    def freeze(self, *, frozen: bool) -> bool:
        """Freeze or thaw all processes of the group. Return whether this succeeded."""
        with contextlib.suppress(OSError):
            if self.version == 2:
                return self._freeze("memory", "cgroup.freeze", str(int(frozen)))
            if "freezer" in self.paths:
                return self._freeze("freezer", "freezer.state", "FROZEN" if frozen else "THAWED")
        return False

    def _freeze(self, controller: str, file: str, wanted: str) -> bool:
        until = time.monotonic() + FREEZE_S
        while time.monotonic() < until:
            # It must be written again: a process that is being created may stay unfrozen.
            self.write(controller, file, wanted)
            if self._is_frozen(wanted):
                return True
            time.sleep(0.01)
        self.write(controller, file, "THAWED" if controller == "freezer" else "0")
        return False

    def _is_frozen(self, wanted: str) -> bool:
        if self.version == 2:
            return f"frozen {wanted}" in self.read("memory", "cgroup.events").splitlines()
        return self.read("freezer", "freezer.state").strip() == wanted

    def ran_out_of_memory(self) -> bool:
        """Return whether a process was killed because memory ran out."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        rows = [line.split() for line in self.read("memory", name).splitlines()]
        return any(row[0] == "oom_kill" and row[1] != "0" for row in rows if len(row) == 2)

    def kill(self) -> None:
        """Kill all processes of the group, also those that it starts meanwhile."""
        until = time.monotonic() + REMOVE_S
        self.freeze(frozen=False)  # a frozen process of version 1 does not end
        while time.monotonic() < until:
            pids = self.read("memory", "cgroup.procs").split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            if not pids:
                return
            time.sleep(0.002)

    def remove(self) -> None:
        """Remove the group. Its last process must have ended. A group that stays is removed by the
        next `sweep`.
        """
        until = time.monotonic() + REMOVE_S
        for path in set(self.paths.values()):
            while True:
                try:
                    os.rmdir(path)
                except OSError as error:
                    if error.errno == errno.EBUSY and time.monotonic() < until:
                        time.sleep(0.002)
                        continue
                break


class Groups:
    """All control groups of one launcher. `parent` is the name of their common parent."""

    def __init__(self, parent: str) -> None:
        self._parent = parent
        self.version = _version()

    def make(self, name: str, memory_bytes: int, processes: int, cpus: float) -> Group:
        """Make a group with these limits. Raises NotLimited if one of them cannot be set."""
        group = Group(self.version)
        if self.version == NONE:
            return group
        try:
            self._make(group, name)
            quota = round(cpus * PERIOD_US)
            if self.version == 2:
                group.write("memory", "memory.max", memory_bytes)
                _without_swap(group, "memory.swap.max", 0)
                group.write("cpu", "cpu.max", f"{quota} {PERIOD_US}")
            else:
                group.write("memory", "memory.limit_in_bytes", memory_bytes)
                _without_swap(group, "memory.memsw.limit_in_bytes", memory_bytes)
                group.write("cpu", "cpu.cfs_period_us", PERIOD_US)
                group.write("cpu", "cpu.cfs_quota_us", quota)
            group.write("pids", "pids.max", processes)
        except (OSError, NotLimited) as error:
            group.remove()
            raise NotLimited(f"The control group cannot be made: {error}") from None
        return group

    def _make(self, group: Group, name: str) -> None:
        if self.version == 2:
            parent = f"{ROOT}/{self._parent}"
            os.makedirs(parent, exist_ok=True)
            for path in (ROOT, parent):
                with open(f"{path}/cgroup.subtree_control", "w", encoding="ascii") as opened:
                    opened.write(" ".join(f"+{controller}" for controller in NEEDED))
            group.paths = dict.fromkeys(NEEDED, f"{parent}/{name}")
            _make_readable(f"{parent}/{name}")
            return
        for controller in WANTED:
            mounted = os.path.realpath(f"{ROOT}/{controller}")
            if os.path.isdir(mounted):
                path = f"{mounted}/{self._parent}/{name}"
                os.makedirs(os.path.dirname(path), exist_ok=True)
                group.paths[controller] = path
                _make_readable(path)

    def share(self, count: int) -> None:
        """Give the parent the share of the processors that `count` process groups have together."""
        if self.version == NONE:
            return
        file, one, most = SHARES[self.version]
        parent = f"{ROOT}/{self._parent}" if self.version == 2 else f"{ROOT}/cpu/{self._parent}"
        with (
            contextlib.suppress(OSError),
            open(f"{parent}/{file}", "w", encoding="ascii") as opened,
        ):
            opened.write(str(min(most, one * max(1, count))))

    def close(self) -> None:
        """Remove the parent, which has no groups."""
        for parent in self._parents():
            with contextlib.suppress(OSError):
                os.rmdir(parent)

    def _parents(self) -> list[str]:
        if self.version == NONE:
            return []
        tops = [ROOT] if self.version == 2 else [f"{ROOT}/{name}" for name in WANTED]
        return [path for path in (f"{top}/{self._parent}" for top in tops) if os.path.isdir(path)]

    def sweep(self, used: set[str]) -> None:
        """Kill the processes of all groups whose names are not in `used`, and remove the groups. A
        launcher that was killed may have left them behind.
        """
        for parent in self._parents():
            for name in os.listdir(parent):
                path = f"{parent}/{name}"
                if name not in used and os.path.isdir(path):
                    left = Group(self.version, {"memory": path, "freezer": path})
                    left.kill()
                    left.remove()


def _version() -> int:
    """Return the version of the control groups that this process can make, or `NONE`."""
    return NONE if missing_controllers() else 2 if _is_version_2() else 1


def _is_version_2() -> bool:
    return os.path.exists(f"{ROOT}/cgroup.controllers")


def missing_controllers() -> list[str]:
    """Return the needed controllers that this process cannot use."""
    if not _is_version_2():
        return [name for name in NEEDED if not os.access(f"{ROOT}/{name}", os.W_OK)]
    found: list[str] = []
    if os.access(f"{ROOT}/cgroup.subtree_control", os.W_OK):
        with open(f"{ROOT}/cgroup.controllers", encoding="ascii") as file:
            found = file.read().split()
    return [name for name in NEEDED if name not in found]


def _make_readable(path: str) -> None:
    """Make the directory of a group. The guest, which is another user, reads its counters."""
    with contextlib.suppress(FileExistsError):  # two controllers may be mounted together
        os.mkdir(path)
    os.chmod(path, 0o755)  # noqa: S103


def _without_swap(group: Group, file: str, value: int) -> None:
    """Limit swap. A host without accounting of swap is accepted only if it has no swap."""
    try:
        group.write("memory", file, value)
    except FileNotFoundError:
        with open("/proc/swaps", encoding="ascii", errors="replace") as swaps:
            if len(swaps.readlines()) > 1:
                raise NotLimited("swap would not count against the memory limit") from None
