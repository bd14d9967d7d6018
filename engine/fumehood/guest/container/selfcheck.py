"""The self-check: before a container takes a call, its wall is inspected and attacked once.

Guest side, used by the supervisor. A child that is called the probe attacks the wall and reads its
own limits from the operating system, before anything untrusted is in the container. The supervisor
reads everything else. A limit is reported as enforced only if the self-check has seen it hold. The
host uses no container that lacks a required limit.
"""

from __future__ import annotations

import os
from typing import Any

from fumehood.guest.container.child import ATTACKS
from fumehood.guest.container.meter import Counters
from fumehood.guest.container.places import MARK, WORKSPACE
from fumehood.guest.container.processes import USER_ID
from fumehood.guest.container.run import Measures, Run
from fumehood.guest.container.watch import Watch, memory_of
from fumehood.guest.container.workspace import Mounts
from fumehood.guest.core import children
from fumehood.guest.core.children import field
from fumehood.guest.core.limits import Limits
from fumehood.guest.core.marks import mark_of
from fumehood.protocol import framing

PROBE_PATIENCE_S = 60.0
"""Time limit of the probe's attacks in seconds. The limit is longer than the time that the host
waits for a container. So a busy machine is never taken for one that does not enforce its limits.
"""
PROBE_WALL_S = 0.03
"""Seconds after the probe's report at which the probe must have been killed."""
PROBE_OUTPUT_BYTES = 1024
CHECK_ID = -1


class SelfCheck:
    """One inspection of the wall by a run that attacks it. `run` is this run, and its process is
    called the probe. `result` returns the findings.
    """

    def __init__(
        self, config: dict[str, Any], counters: Counters, mounts: Mounts, watch: Watch
    ) -> None:
        self._config = config
        self._counters = counters
        self._mounts = mounts
        self._watch = watch
        self._sees_memory = False
        self._sealed: bool | None = None
        self._held: dict[str, bool] = {}
        self._limits: dict[str, int] = {}
        self.run = Run(
            CHECK_ID,
            "probe",
            Limits(PROBE_PATIENCE_S, PROBE_PATIENCE_S, config["memory_bytes"], PROBE_OUTPUT_BYTES),
            bytearray(framing.encode({"program": "probe", "arguments": {}})),
        )

    def look_at(self, pid: int, claim: dict[str, Any]) -> None:
        """Inspect the probe, the process `pid`, from outside, after it has reported its attacks in
        `claim`.
        """
        self._held = claim.get("probe", {})
        self._sealed = _is_sealed(pid)
        self._limits = claim.get("limits", {})
        own = memory_of(children.status(pid))
        self._sees_memory = own > 0 and self._watch.look().threads > 0

    def result(self, run: Run, after: Measures) -> tuple[dict[str, bool], list[str]]:
        """Return two values. The first maps the name of each limit to True if the limit is
        enforced. The second lists the reasons why the container is unusable, and is empty if it is
        usable.

        `run` is the probe's run, and `after` has the container's counters after that run.
        """
        faults = []
        if self._sealed is not True:
            why = (run.claim or {}).get("fault", "it does not say why")
            faults.append(f"a child was not sealed: {why}"[:200])
        faults += [
            f"an attack was not refused: {name}" for name in ATTACKS if not self._held.get(name)
        ]
        was_killed = run.killed_for == "wall_time"
        memory_bytes = int(self._config["memory_bytes"])
        enforces = {
            "wall_time": was_killed,
            "output": was_killed,  # enforced by the same kill
            "cpu_time": was_killed and (after.cpu_ns is not None or run.reaped_cpu_ns > 0),
            "memory": self._limits_memory(memory_bytes),
            "processes": self._limits_processes(),
            "files": MARK is not None or _root_is_read_only(),
            "network": MARK is not None or _has_only_loopback(),
            "open_files": 0 < self._limits.get("Max open files", 0) <= int(self._config["nofile"]),
            "file_size": 0
            < self._limits.get("Max file size", 0)
            <= int(self._config["fsize_bytes"]),
            "disk": self._limits_disk(memory_bytes),
        }
        return enforces, faults

    def _limits_memory(self, memory_bytes: int) -> bool:
        """Return whether the memory of the container is limited. `memory_bytes` is the limit of
        programs. If the operating system does not show the container's limit, as on old gVisor, the
        host has made sure of it.
        """
        if self._config["is_watched"]:
            return self._sees_memory
        seen = self._counters.memory_limit
        return seen is None or seen <= memory_bytes + int(self._config["guest_bytes"])

    def _limits_processes(self) -> bool:
        if self._limits.get("forked", 0) > int(self._config["processes"]):
            return False
        limit = self._counters.process_limit or self._limits.get("Max processes", 0)
        return 0 < limit <= 2 * int(self._config["processes"])  # includes the guest's processes

    def _limits_disk(self, memory_bytes: int) -> bool:
        """Return whether the disk limits are enforced. The writable mounts together must not be
        larger than half of the memory limit `memory_bytes`. If the configuration limits the
        workspace's disk (`disk_bytes`), the workspace is compared with that limit instead.
        """
        if MARK is not None:
            return not self._mounts.are_full()
        found = {path: os.statvfs(path) for path in self._mounts.paths}
        sizes = {path: one.f_blocks * one.f_frsize for path, one in found.items()}
        is_right = len(sizes) == 3
        if disk_bytes := int(self._config["disk_bytes"]):
            is_right = 0 < sizes.pop(WORKSPACE, 0) <= disk_bytes and is_right
        return is_right and 0 < sum(sizes.values()) <= memory_bytes // 2


def _is_sealed(pid: int) -> bool:
    """Return whether the process `pid` has irrevocably given up its rights. It must run as the
    programs' user, without groups and capabilities. It must also have more system-call filters than
    this process.
    """
    shown = children.status(pid)
    if MARK is not None:
        return mark_of(pid) == MARK - 1 and children.is_sealed(pid, children.own_filters())
    users = {value for key in (b"Uid", b"Gid") for value in (field(shown, key) or b"?").split()}
    capabilities = [
        field(shown, key) or b"?" for key in (b"CapEff", b"CapPrm", b"CapInh", b"CapBnd")
    ]
    return (
        users == {b"%d" % USER_ID}
        and field(shown, b"Groups") == b""
        and all(set(mask) == {ord("0")} for mask in capabilities)
        # Without NoNewPrivs the kernel would have refused the filter. Some runtimes do not show it.
        and field(shown, b"NoNewPrivs") in (b"1", None)
        and children.is_filtered(shown, children.own_filters())
    )


def _root_is_read_only() -> bool:
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        options = [line.split()[3] for line in mounts if line.split()[1] == "/"]
    return bool(options) and "ro" in options[-1].split(",")


def _has_only_loopback() -> bool:
    with open("/proc/net/dev", encoding="ascii", errors="replace") as devices:
        names = [line.split(":")[0].strip() for line in devices if ":" in line]
    return set(names) <= {"lo"}
