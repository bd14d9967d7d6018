"""The launcher: starts, holds and hands over the sandboxes of one user.

Host side, a process of its own with one thread, standard library only. It outlives the engine, so
that the sandboxes of sessions do, and it is the parent of all sandboxes, so that it learns how each
of them has ended. A request is one packet of JSON, with descriptors, on a Unix socket; the answer
is one packet. Invariants: it serves only processes of its own user; a sandbox is written down
before its start is answered, so that the next launcher can hold it; nothing that a program writes
reaches the launcher; no request ends it, or makes it wait for a program for more than some seconds.

Everything of the launcher is in one directory: its socket, its lock, its log, the records of its
sandboxes, and the places of its mounts, which only the launcher and its sandboxes see.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import json
import os
import platform
import resource
import selectors
import shutil
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

if __name__ == "__main__":
    sys.path[:] = [*json.loads(sys.argv[1])["import_paths"], *sys.path]

from fumehood.direct import cgroups, ids, sandbox
from fumehood.guest.core import kernel

VERSION = 4
"""Version of the requests. An engine uses only a launcher of its own version."""

MAX_BYTES = 128 * 1024
STREAMS = ("stdin", "stdout", "stderr")
MAX_ANSWER_BYTES = 4 << 20
SO_SNDBUFFORCE = 32
"""*Source*: <asm-generic/socket.h>."""

PATIENCE_S = 5.0
"""Maximum seconds until a connected engine has sent its request."""

TAKEOVER = "\0fumehood-takeover"
"""Address of the guest's socket for takeovers. *Source*: `guest/container/takeover.py`."""

WATCH_S = 0.1
"""Seconds between two looks at the memory of sandboxes that a starter started without a control
group.
"""

FOLDER_END = ".folder"
"""How the name of the directory of a starter's sandbox ends."""

COMMAND_S = 120.0
"""Maximum seconds for a command of a starter. A busy host is slow."""

KILL_ROUNDS = 50
"""How often the processes of a sandbox are searched and killed."""

SETTLE_S = 5.0
"""Seconds after the end of a starter's sandbox in which its other processes end."""

ROOT, DISK, FOLDER = "root", "disk", "folder"
"""What a command of a starter finds below `sandbox.PLACE`: the root file system and the disk of a
sandbox, if it starts one, and the directory of the sandbox.
"""

STOP_S = 1.0
"""Maximum seconds until all processes of a sandbox without a control group are stopped."""

STOPPING = 1 << (signal.SIGSTOP - 1)
"""The bit of SIGSTOP in a set of signals."""

UNKNOWN_STATUS = 255
"""Exit code of a sandbox that has ended while no launcher was its parent."""

JOIN_SESSION_KEYRING = 1
KEYCTL = {"x86_64": 250, "aarch64": 219}
"""Architecture → number of keyctl(2)."""


HOST_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""The directories of the host that sandboxes of the image `host` have. Those that are links are
links in its skeleton.
"""


def host_folders() -> list[str]:
    """Return those of `HOST_FOLDERS` that this host has as directories of their own."""
    return [path for path in HOST_FOLDERS if os.path.isdir(path) and not os.path.islink(path)]


class Refused(Exception):
    """A request that is not carried out. `kind` is `missing`, `conflict`, `limits` or `failed`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass
class Sandbox:
    """One sandbox: its first process, and how it has ended."""

    name: str
    pid: int
    began: int
    """When the process began, in clock ticks since the host's start. Together with the pid, this
    identifies the process.
    """
    image_id: str
    layers: list[str]
    labels: dict[str, str]
    disk: str | None
    group: cgroups.Group
    stopped: list[tuple[int, int]] = field(default_factory=list)
    """The processes that were stopped because the sandbox has no control group: process id and
    beginning of each.
    """
    starter: str | None = None
    """Name of the module that started the sandbox (`_begin`), or None if the launcher did."""
    memory_bytes: int = 0
    """The memory limit of the whole sandbox."""
    exit_code: int | None = None
    out_of_memory: bool = False
    is_paused: bool = False

    def shown(self) -> dict[str, Any]:
        """Return the state of the sandbox for an engine."""
        return {
            "name": self.name, "pid": self.pid, "image_id": self.image_id, "layers": self.layers,
            "labels": self.labels, "disk": self.disk, "starter": self.starter,
            "is_running": self.exit_code is None, "is_paused": self.is_paused,
            "exit_code": self.exit_code,
            "out_of_memory": self.out_of_memory, "is_watched": self.group.version == cgroups.NONE,
        }  # fmt: skip


@dataclass
class _Held:
    sandbox: Sandbox
    process: int
    """A descriptor of the first process, which becomes readable when the process has ended."""
    waiting: list[socket.socket] = field(default_factory=list)
    """Connections of engines that wait until the sandbox is removed."""
    is_removed: bool = False
    is_starting: bool = False
    """Whether a starter still starts it. It then has no process yet."""
    command: int = 0
    """The process id of the command that starts, freezes or thaws it now, or 0."""


class Launcher:
    """Serves the socket `listener` in `directory`, until no sandbox runs and no engine has sent a
    request for `idle_s` seconds. The records of sandboxes that have ended stay for the next
    launcher.
    """

    def __init__(self, directory: str, listener: socket.socket, idle_s: float) -> None:
        self._directory = directory
        self._ids, self._why_no_ids = _ids_of_sandboxes()
        self._place = f"{directory}/root"
        self._empty = f"{directory}/empty"
        self._listener = listener
        self._idle_s = idle_s
        self._groups = cgroups.Groups(
            f"fumehood-{hashlib.sha256(directory.encode()).hexdigest()[:12]}"
        )
        self._held: dict[str, _Held] = {}
        self._workers: set[int] = set()
        """Descriptors of the processes that change layers, and of the commands of starters."""
        self._children: set[int] = set()
        """Ids of these processes."""
        self._commands: dict[int, float] = {}
        """Process id of each command of a starter → when it is killed."""
        self._has_netns = False
        """Whether this process has left the host's netns."""
        self._settled_at = 0.0
        """When all processes of a starter's sandbox that has ended were reaped."""
        self._locks: dict[tuple[str, ...], list[int]] = {}
        """Layers of an image → descriptors of their directories, which are locked. Two stores may
        have the same image.
        """
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serve requests. Return when no sandbox runs any more."""
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        for directory in (self._place, self._empty):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        sandbox.enter(sandbox.CLONE_NEWNS)
        # What the host unmounts later disappears here also.
        sandbox.mount("none", "/", None, sandbox.MS_REC | sandbox.MS_SLAVE)
        self._adopt()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            watched = [held for held in self._held.values() if _is_looked_at(held)]
            looks = watched or self._commands or time.monotonic() < self._settled_at
            ready = self._selector.select(WATCH_S if looks else self._idle_s)
            if not ready and not looks and not self._runs_any():
                self._groups.close()
                return
            for key, _ in ready:
                _guarded(key.data)
            for held in watched:
                _guarded(functools.partial(self._look_at, held))
            self._end_late_commands()
            self._reap_strays()

    def _runs_any(self) -> bool:
        held = (held.sandbox.exit_code is None for held in self._held.values())
        return bool(self._workers) or any(held)

    # -- requests ----------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors are left
            time.sleep(0.05)
            return
        descriptors: list[int] = []
        answer: dict[str, Any] | None
        try:
            connection.settimeout(PATIENCE_S)
            _let_answers_be_long(connection)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_BYTES, len(STREAMS))
            if struct.unpack("3i", credentials)[1] != os.geteuid():
                raise Refused("failed", "the launcher serves only its own user")
            answer = self._answer(json.loads(data), descriptors, connection)
        except Refused as refused:
            answer = {"error": str(refused), "kind": refused.kind}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "failed"}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if answer is not None:
            _reply(connection, answer)

    def _answer(
        self, request: dict[str, Any], descriptors: list[int], connection: socket.socket
    ) -> dict[str, Any] | None:
        """Carry out a request, and return the answer. Return None if `connection` gets the answer
        later.
        """
        match request["do"]:
            case "hello":
                return {
                    "version": VERSION, "pid": os.getpid(), "cgroups": self._groups.version,
                    "ids": self._ids,
                }  # fmt: skip
            case "launch":
                return self._launch(request["plan"], descriptors, connection)
            case "list":
                return {"sandboxes": [held.sandbox.shown() for held in self._held.values()]}
            case "remove":
                return self._remove(request["name"], connection)
            case "layers":
                self._work(request, descriptors, connection)
                return None
            case "state":
                return self._held_one(request["name"]).shown()
            case "freeze":
                held = self._running(request["name"])
                return self._freeze(held, connection, frozen=request["frozen"])
            case "take_over":
                return self._hand_over(request, descriptors, connection)
            case unknown:
                raise Refused("failed", f"unknown request {unknown!r}")

    def _held_one(self, name: str) -> Sandbox:
        held = self._held.get(name)
        if held is None or held.is_removed or held.is_starting:
            raise Refused("missing", "the sandbox does not exist")
        return held.sandbox

    def _running(self, name: str) -> Sandbox:
        held = self._held_one(name)
        if held.exit_code is not None:
            raise Refused("conflict", "the sandbox has ended")
        return held

    def _hand_over(
        self, request: dict[str, Any], descriptors: list[int], connection: socket.socket
    ) -> dict[str, Any] | None:
        held = self._running(request["name"])
        if held.starter is not None:
            self._enter(held, request["command"], descriptors, connection)
            return None
        _take_over(self._held[held.name].process, int(request["epoch"]), descriptors)
        return {}

    def _freeze(
        self, held: Sandbox, connection: socket.socket, *, frozen: bool
    ) -> dict[str, Any] | None:
        if held.starter is not None:
            if not held.is_paused and not frozen:
                return {}
            self._freeze_by_starter(held, connection, frozen=frozen)
            return None
        if held.group.version == cgroups.NONE:
            if frozen:
                self._stop(held)
            else:
                self._resume(held)
        elif not held.group.freeze(frozen=frozen):
            raise Refused("failed", "the sandbox cannot be frozen")
        held.is_paused = frozen
        with contextlib.suppress(OSError):
            self._write_down(held)
        return {}

    def _stop(self, held: Sandbox) -> None:
        """Stop all processes of a sandbox, and note those that were not stopped before.

        Raises:
            Refused: they do not all stop in time.
        """
        until = time.monotonic() + STOP_S
        held.is_paused = True  # before, so that an engine resumes them if the launcher is killed
        try:
            while time.monotonic() < until:
                running = [pid for pid in _processes_of(held.pid) if not _is_stopped(pid)]
                if not running:
                    return
                known = {pid for pid, _ in held.stopped}
                held.stopped += [(pid, _began(pid)) for pid in running if pid not in known]
                self._write_down(held)
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                time.sleep(0.002)
        except OSError:
            pass
        self._resume(held)
        held.is_paused = False
        with contextlib.suppress(OSError):
            self._write_down(held)
        raise Refused("failed", "the processes of the sandbox do not stop")

    def _resume(self, held: Sandbox) -> None:
        """Resume the processes that `_stop` has noted."""
        for pid, began in held.stopped:
            with contextlib.suppress(ProcessLookupError):
                if _began(pid) == began:
                    os.kill(pid, signal.SIGCONT)
        held.stopped = []

    def _launch(
        self, plan: dict[str, Any], descriptors: list[int], connection: socket.socket
    ) -> dict[str, Any] | None:
        self._check(plan, descriptors)
        name, starter = plan["name"], plan["starter"]
        try:
            group = self._groups.make(name, plan["memory_bytes"], plan["processes"], plan["cpus"])
        except cgroups.NotLimited as error:
            raise Refused("limits", str(error)) from None
        pid = 0
        started = Sandbox(
            name, 0, 0, plan["image_id"], plan["layers"], plan["labels"],
            plan["disk"] and plan["disk"][0], group,
            starter=starter, memory_bytes=plan["memory_bytes"],
        )  # fmt: skip
        try:
            if starter is not None:
                self._begin(plan, started, descriptors, connection)
                return None
            assert self._ids is not None
            with self._mounts(plan, group) as trees:
                plan["ids"] = [[0, *self._ids]]
                on_first = functools.partial(self._note_first, started)
                pid = sandbox.start(plan, trees, descriptors, group.join, on_first)
            self._hold(started)
            self._groups.share(len(self._held))
        except BaseException as error:
            if pid:
                os.kill(pid, signal.SIGKILL)
            group.kill()
            if pid:
                os.waitpid(pid, 0)
            elif starter is not None:
                _kill_named(started)
            self._discard(started)
            if isinstance(error, sandbox.NotStarted):
                raise Refused("failed", str(error)) from None
            raise
        return {"pid": pid}

    def _check(self, plan: dict[str, Any], descriptors: list[int]) -> None:
        """Check that a plan can be carried out. Raises Refused."""
        name = plan["name"]
        if name in self._held:
            raise Refused("conflict", "the name is taken")
        if os.path.basename(name) != name or name.startswith("."):
            raise Refused("failed", "the name cannot be that of a file")
        if len(descriptors) != len(STREAMS):
            raise Refused("failed", "a sandbox has three standard streams")
        if plan["starter"] is None and self._ids is None:
            raise Refused("failed", self._why_no_ids)
        if plan["is_watched"] != (self._groups.version == cgroups.NONE):
            raise Refused("limits", "the control groups of this host have changed")

    def _discard(self, started: Sandbox) -> None:
        """Remove what is left of a sandbox that did not start."""
        started.group.remove()
        self._remove_folder(started)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._directory}/{started.name}.json")
        self._unlock_images()

    # -- sandboxes of a starter ---------------------------------------------------------

    def _begin(
        self,
        plan: dict[str, Any],
        started: Sandbox,
        descriptors: list[int],
        connection: socket.socket,
    ) -> None:
        """Let the starter of a plan start its sandbox. This takes about a second, so `connection`
        gets the answer later.

        A starter is a module such as `gvisor/starter.py`. It returns the commands that start and
        change a sandbox. The launcher makes the mounts, and runs the commands. Its sandboxes have
        directories of their own.
        """
        folder = self._folder(started)
        entry = _Held(started, -1, is_starting=True)

        def on_end(code: int) -> None:
            entry.is_starting = False
            entry.command = 0
            del self._held[started.name]
            try:
                if code != 0:
                    raise Refused("failed", starter.last_words(folder) or f"exit code {code}")
                self._note_first(started, starter.pid_of(folder))
                self._hold(started, entry.waiting)
                self._groups.share(len(self._held))
            except Exception as error:
                self._let_go(started.name)
                started.group.kill()
                _kill_named(started)
                self._discard(started)
                for waiting in entry.waiting:
                    _reply(waiting, {})
                kind = error.kind if isinstance(error, Refused) else "failed"
                _reply(connection, {"error": str(error), "kind": kind})
                return
            _reply(connection, {"pid": started.pid})
            if entry.is_removed:
                held = self._held[started.name]
                held.is_removed = True
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held.process, signal.SIGKILL)

        self._write_down(started)
        os.mkdir(folder, 0o700)
        starter = _module_of(started)
        starter.prepare(plan, folder)
        self._give_away(folder)
        with self._mounts(plan, started.group) as mounts:
            disk = plan["disk"][2] if plan["disk"] else None
            trees = {
                DISK if path == disk else f"{ROOT}{path.rstrip('/')}": tree
                for path, tree in mounts.items()
            }
            command = starter.start_command(started.name)
            entry.command = self._run(
                command, folder, descriptors, on_end, trees, started.group.join
            )
        self._held[started.name] = entry

    def _give_away(self, folder: str) -> None:
        """Let the root of sandboxes own the directory of a sandbox, and what is in it."""
        if self._ids is not None:
            for path, _, names in os.walk(folder):
                for own in (path, *(f"{path}/{name}" for name in names)):
                    os.chown(own, self._ids[0], self._ids[0])

    def _run(
        self,
        command: list[str],
        folder: str,
        streams: Sequence[int],
        on_end: Callable[[int], None],
        trees: Mapping[str, int] = MappingProxyType({}),
        join_group: Callable[[], None] = lambda: None,
    ) -> int:
        """Run a command of a starter with these standard streams, and call `on_end` with its exit
        code. Return its process id. It sees the sandbox's directory `folder` and the mounts `trees`
        below `sandbox.PLACE`.
        """
        self._enter_netns()
        own = sandbox.clone_mount(folder, sandbox.ATTR_NOSUID | sandbox.ATTR_NODEV)
        try:
            with _as_pipes(streams) as pipes:
                pid = sandbox.run_apart(
                    command, {**trees, FOLDER: own}, pipes, join_group,
                    [[0, *self._ids]] if self._ids is not None else [],
                )  # fmt: skip
        finally:
            os.close(own)

        def ended() -> None:
            del self._commands[pid]
            on_end(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        try:
            self._await(pid, ended)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._commands[pid] = time.monotonic() + COMMAND_S
        return pid

    def _enter_netns(self) -> None:
        """Enter a network namespace of our own, or that of an earlier launcher whose sandboxes
        still run. In the host's, every user could reach the sockets at which commands of runsc and
        gVisor meet, and gVisor answers every user.
        """
        if self._has_netns:
            return
        for held in self._held.values():
            started = held.sandbox
            if started.starter is not None and started.pid and started.exit_code is None:
                sandbox.join_netns_of_sockets(started.pid, held.process)
                break
        else:
            sandbox.enter(sandbox.CLONE_NEWNET)
        self._has_netns = True

    def _end_late_commands(self) -> None:
        for pid, until in self._commands.items():
            if time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _freeze_by_starter(self, held: Sandbox, connection: socket.socket, *, frozen: bool) -> None:
        """Freeze or thaw a sandbox. That it may be frozen is written down before, so that the next
        launcher thaws it.
        """
        entry, starter = self._held[held.name], _module_of(held)
        if entry.command:
            raise Refused("failed", "the sandbox is being frozen or thawed")
        held.is_paused = True
        self._write_down(held)
        shown_r, shown_w = os.pipe()

        def answer(*, has_succeeded: bool) -> None:
            os.close(shown_r)
            os.close(shown_w)
            entry.command = 0
            if self._held.get(held.name) is not entry or held.exit_code is not None:
                _reply(connection, {"error": "the sandbox has ended", "kind": "conflict"})
            elif not has_succeeded:
                _reply(connection, {"error": "the sandbox cannot be frozen", "kind": "failed"})
            else:
                held.is_paused = frozen
                with contextlib.suppress(OSError):
                    self._write_down(held)
                _reply(connection, {})

        def on_end(code: int) -> None:
            if code == 0:
                answer(has_succeeded=True)
                return
            try:  # it may be in this state already
                run(starter.state_command(held.name), on_shown)
            except Exception:
                answer(has_succeeded=False)

        def on_shown(code: int) -> None:
            os.set_blocking(shown_r, False)
            said = b""
            with contextlib.suppress(BlockingIOError):
                said = os.read(shown_r, MAX_BYTES)
            answer(has_succeeded=(starter.PAUSED if frozen else starter.RUNNING) in said)

        def run(command: list[str], then: Callable[[int], None]) -> None:
            with open(os.devnull, "rb", 0) as null:
                streams = [null.fileno(), shown_w, shown_w]
                entry.command = self._run(command, self._folder(held), streams, then)

        with contextlib.ExitStack() as undo:
            undo.callback(os.close, shown_r)
            undo.callback(os.close, shown_w)
            run(starter.freeze_command(held.name, frozen=frozen), on_end)
            undo.pop_all()

    def _enter(
        self,
        held: Sandbox,
        wanted: list[str],
        descriptors: list[int],
        connection: socket.socket,
    ) -> None:
        """Run a command in a sandbox, with the streams `descriptors`."""
        if len(descriptors) != len(STREAMS):
            raise Refused("failed", "a command has three standard streams")

        def on_end(code: int) -> None:
            failed = {"error": "the guest could not be reached", "kind": "failed"}
            _reply(connection, failed if code != 0 else {})

        command = _module_of(held).enter_command(held.name, wanted)
        self._run(command, self._folder(held), descriptors, on_end, join_group=held.group.join)

    def _look_at(self, held: _Held) -> None:
        """Kill a sandbox that uses more memory than it may, or of which this is unknown."""
        started = held.sandbox
        if started.exit_code is not None or started.out_of_memory:
            return
        try:
            used = _module_of(started).memory_bytes(started.pid)
            started.out_of_memory = used > started.memory_bytes
        except Exception as error:
            if _began(started.pid) != started.began or _has_ended(started.pid):
                return
            why = str(error)
        else:
            if not started.out_of_memory:
                return
            why = "it uses too much memory"
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(held.process, signal.SIGKILL)
        print(f"{started.name} was killed: {why}", file=sys.stderr, flush=True)

    def _reap_strays(self) -> None:
        """Reap the other processes of starters, which are this process's children."""
        known = {held.sandbox.pid for held in self._held.values()} | self._children
        with contextlib.suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid not in known:
                os.waitpid(ended.si_pid, 0)

    def _folder(self, held: Sandbox) -> str:
        """Return the directory of a sandbox that a starter started."""
        return f"{self._directory}/{held.name}{FOLDER_END}"

    def _remove_folder(self, held: Sandbox) -> None:
        if held.starter is not None:
            shutil.rmtree(self._folder(held), ignore_errors=True)

    # -- starting ---------------------------------------------------------------------

    def _note_first(self, started: Sandbox, first: int) -> None:
        """Write down a sandbox whose first process waits for its start."""
        started.pid, started.began = first, _began(first)
        self._write_down(started)

    @contextlib.contextmanager
    def _mounts(self, plan: dict[str, Any], group: cgroups.Group) -> Iterator[dict[str, int]]:
        """Provide the mounts of a sandbox: its path → a descriptor of the mount."""
        plain = sandbox.ATTR_NOSUID | sandbox.ATTR_NODEV
        trees: dict[str, int] = {}
        try:
            self._lock(plan["layers"])
            # Each sandbox has an overlay of its own, so that sandboxes share no inodes and locks.
            options = _lower([self._empty, *plan["layers"]]) + ids.overlay_options()
            attributes = plain | sandbox.ATTR_RDONLY
            if plan["changes"] is not None:
                upper, work = map(_escaped, plan["changes"])
                options += f",upperdir={upper},workdir={work}"
                attributes = plain
            with self._mounted("overlay", "overlay", options) as mounted:
                trees["/"] = sandbox.clone_mount(mounted, attributes)
            for path in host_folders() if plan["with_host"] else ():
                attributes = plain | sandbox.ATTR_RDONLY
                trees[path] = sandbox.clone_mount(path, attributes)
            for name in sandbox.DEVICES if plan["starter"] is None else ():
                if plan["is_watched"] and name == sandbox.SHARES_MEMORY:
                    continue
                attributes = sandbox.ATTR_NOSUID | sandbox.ATTR_NOEXEC
                trees[f"/dev/{name}"] = sandbox.clone_mount(f"/dev/{name}", attributes)
            shown = group.shown() if plan["starter"] is None else {}
            plan["cgroup_places"] = [path for path in shown if path]
            for path, directory in shown.items():
                attributes = plain | sandbox.ATTR_NOEXEC | sandbox.ATTR_RDONLY
                target = f"/sys/fs/cgroup/{path}".rstrip("/")
                trees[target] = sandbox.clone_mount(directory, attributes)
            if plan["disk"]:
                _, device, directory = plan["disk"]
                with self._mounted(device, "ext4") as mounted:
                    trees[directory] = sandbox.clone_mount(mounted, plain)
            yield trees
        finally:
            for descriptor in trees.values():
                os.close(descriptor)

    @contextlib.contextmanager
    def _mounted(self, source: str, kind: str, options: str | None = None) -> Iterator[str]:
        """Mount a file system for the duration of the block, and yield the directory."""
        flags = sandbox.MS_NOSUID | sandbox.MS_NODEV | sandbox.MS_NOATIME
        sandbox.mount(source, self._place, kind, flags, options)
        try:
            yield self._place
        finally:
            sandbox.unmount(self._place)

    def _lock(self, layers: Sequence[str]) -> None:
        """Lock the layers of an image, so that nobody removes them while a sandbox uses them."""
        locks = self._locks.setdefault(tuple(layers), [])
        for layer in layers if not locks else ():
            try:
                lock = os.open(os.path.dirname(layer), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                raise Refused("missing", f"the image is incomplete: {layer} is missing") from None
            locks.append(lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _unlock_images(self) -> None:
        """Unlock the images that no sandbox uses, so that they can be removed."""
        used = {tuple(held.sandbox.layers) for held in self._held.values()}
        for layers in set(self._locks) - used:
            for lock in self._locks.pop(layers):
                os.close(lock)

    def _work(
        self, request: dict[str, Any], descriptors: list[int], connection: socket.socket
    ) -> None:
        """Carry out a request for layers in a process of its own, which answers it."""
        worker = os.fork()
        if worker == 0:
            try:
                # Not the launcher's lock and socket: this process may outlive the launcher.
                _close_others({connection.fileno(), *descriptors})
                own_id = (0, 1)  # without sub-ids, layers belong to the user who runs the launcher
                _reply(connection, _work_on_layers(request, descriptors, self._ids or own_id))
            finally:
                os._exit(0)
        connection.close()
        self._await(worker, lambda: os.waitpid(worker, 0))

    def _await(self, child: int, on_end: Callable[[], object]) -> None:
        """Call `on_end`, which reaps the process `child`, when it has ended."""
        process = os.pidfd_open(child)

        def ended() -> None:
            self._selector.unregister(process)
            self._workers.discard(process)
            self._children.discard(child)
            os.close(process)
            on_end()

        try:
            self._selector.register(process, selectors.EVENT_READ, ended)
        except BaseException:
            os.close(process)
            raise
        self._workers.add(process)
        self._children.add(child)

    def _remove(self, name: str, connection: socket.socket) -> dict[str, Any] | None:
        held = self._held.get(name)
        if held is None:
            return {}
        held.is_removed = True
        if held.is_starting:
            held.waiting.append(connection)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(held.command, signal.SIGKILL)
            return None
        if held.sandbox.exit_code is not None:
            self._forget(held)
            return {}
        # Killing the first process of a PID namespace kills all its processes, and the kernel ends
        # it after them.
        with contextlib.suppress(ProcessLookupError):  # it has just been reaped
            signal.pidfd_send_signal(held.process, signal.SIGKILL)
        held.waiting.append(connection)
        held.sandbox.group.freeze(frozen=False)  # a frozen process may not end
        return None

    # -- processes -----------------------------------------------------------------

    def _hold(self, held: Sandbox, waiting: Sequence[socket.socket] = ()) -> None:
        entry = _Held(held, os.pidfd_open(held.pid), [*waiting])
        self._selector.register(entry.process, selectors.EVENT_READ, lambda: self._ended(entry))
        self._held[held.name] = entry

    def _ended(self, held: _Held) -> None:
        """Note how a sandbox has ended. Its first process is the last one that ends, unless a
        starter started it.
        """
        self._selector.unregister(held.process)
        os.close(held.process)
        code = UNKNOWN_STATUS
        with contextlib.suppress(ChildProcessError):  # it was the child of an earlier launcher
            code = os.waitstatus_to_exitcode(os.waitpid(held.sandbox.pid, 0)[1])
        held.sandbox.exit_code = code if code >= 0 else 128 - code
        if held.sandbox.group.ran_out_of_memory():
            held.sandbox.out_of_memory = True
        if held.sandbox.starter is not None:
            held.sandbox.group.kill()  # its other processes may end later
            self._settled_at = time.monotonic() + SETTLE_S
        held.sandbox.group.remove()
        held.sandbox.is_paused = False
        with contextlib.suppress(OSError):  # the next launcher then says that it is unknown
            self._write_down(held.sandbox)
        if held.is_removed:
            self._forget(held)

    def _forget(self, held: _Held) -> None:
        del self._held[held.sandbox.name]
        self._remove_folder(held.sandbox)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._directory}/{held.sandbox.name}.json")
        self._unlock_images()
        self._groups.share(len(self._held))
        for connection in held.waiting:
            _reply(connection, {})

    def _write_down(self, held: Sandbox) -> None:
        path = f"{self._directory}/{held.name}.json"
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(asdict(held), file)
        os.rename(f"{path}.new", path)

    def _adopt(self) -> None:
        """Hold the sandboxes of a launcher that was killed, and remove what else it has left."""
        names = os.listdir(self._directory)
        for name in names:
            path = f"{self._directory}/{name}"
            if name.endswith(".json.new"):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif name.endswith(".json"):
                try:
                    self._adopt_one(path)
                except Exception:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            elif name.endswith(FOLDER_END) and f"{name[: -len(FOLDER_END)]}.json" not in names:
                shutil.rmtree(path, ignore_errors=True)
        self._groups.sweep(set(self._held))

    def _adopt_one(self, path: str) -> None:
        with open(path, encoding="utf-8") as opened:
            found = json.load(opened)
        held = Sandbox(**{**found, "group": cgroups.Group(**found["group"])})
        with contextlib.suppress(Refused, OSError):  # the image was removed by hand
            self._lock(held.layers)
        if held.exit_code is None and held.pid:
            with contextlib.suppress(ProcessLookupError):
                self._hold(held)
            if _began(held.pid) == held.began:  # looked at only now: the descriptor cannot change
                return
            self._let_go(held.name)
        if held.exit_code is None:
            held.exit_code = UNKNOWN_STATUS
            if held.starter is not None:
                _kill_named(held)  # if it was still starting, it has no process yet
        self._remove_folder(held)
        held.group.kill()
        held.group.remove()
        self._held[held.name] = _Held(held, -1)

    def _let_go(self, name: str) -> None:
        """Forget the process of a sandbox, if it has one."""
        held = self._held.pop(name, None)
        if held is not None:
            self._selector.unregister(held.process)
            os.close(held.process)


@contextlib.contextmanager
def _as_pipes(descriptors: Sequence[int]) -> Iterator[list[int]]:
    """Provide the descriptors of standard streams, with an empty pipe instead of a file. As root,
    runsc gives the files of standard streams to another user, which must not happen to /dev/null.
    """
    with contextlib.ExitStack() as undo:
        found = []
        for descriptor in descriptors:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                descriptor, writable = os.pipe()
                os.close(writable)
                undo.callback(os.close, descriptor)
            found.append(descriptor)
        yield found


def _module_of(held: Sandbox) -> Any:
    assert held.starter is not None
    return importlib.import_module(held.starter)


def _guarded(work: Callable[[], object]) -> None:
    """Do something that must not end the launcher."""
    try:
        work()
    except Exception:
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()


def _kill_named(held: Sandbox) -> None:
    """Kill the processes that start or run a sandbox of a starter, by their command lines. The
    first ones may start others meanwhile.
    """
    for _ in range(KILL_ROUNDS):
        found = _named(_module_of(held), held.name)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _named(starter: Any, name: str) -> list[int]:
    """Return the ids of the processes that start or run a starter's sandbox with this name."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if starter.is_of(_command_line(pid), name)]


def _command_line(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:
        return []


def _is_looked_at(held: _Held) -> bool:
    """Whether the launcher watches the memory of a sandbox."""
    started = held.sandbox
    is_there = started.starter is not None and not held.is_starting and started.exit_code is None
    return is_there and started.group.version == cgroups.NONE


def _ids_of_sandboxes() -> tuple[tuple[int, int] | None, str]:
    """Return the user ids of sandboxes and "", or None and the reason."""
    try:
        return ids.ids_of_sandboxes(), ""
    except ids.NoIds as error:
        return None, str(error)


def _close_others(kept: set[int]) -> None:
    """Close all descriptors above the standard streams, except `kept`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the one that has listed them
                os.close(int(name))


def _work_on_layers(
    request: dict[str, Any], descriptors: list[int], sandbox_ids: tuple[int, int]
) -> dict[str, Any]:
    from fumehood.direct import layers  # only here, because the launcher needs little memory

    os.umask(0o022)
    try:
        store = layers.Layers(request["home"], sandbox_ids)
        file = os.fdopen(descriptors[0], "r+b", 0) if descriptors else None
        if file is not None:  # an earlier worker may have been killed in the middle
            file.seek(request["offset"])
            if request["call"] == "save":
                file.truncate()
        return store.do(request["call"], request["with"], file)
    except layers.Refused as refused:
        return {"error": str(refused), "kind": refused.kind}
    except OSError as error:
        return {"error": str(error), "kind": "failed"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": "failed"}


def _lower(layers: Sequence[str]) -> str:
    """Return the option of overlayfs for these layers. The first one is the lowest."""
    return "lowerdir=" + ":".join(map(_escaped, reversed(layers)))


def _escaped(path: str) -> str:
    """Escape a path for the options of overlayfs."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _reply(connection: socket.socket, answer: dict[str, Any]) -> None:
    with connection, contextlib.suppress(OSError):
        connection.send(json.dumps(answer).encode())


def _let_answers_be_long(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, MAX_ANSWER_BYTES)
    except PermissionError:  # an ordinary user's launcher; the host then limits it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_ANSWER_BYTES)


def _began(pid: int) -> int:
    """Return when a process began, in clock ticks since the host's start, or 0 if it is gone.
    *Source*: proc_pid_stat(5), starttime.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, and only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _processes_of(first: int) -> list[int]:
    """Return the ids of all processes in the PID namespace whose first process is `first`."""
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                found.append(int(name))
    return found


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped or have ended. A thread that waits for a process
    that it has started by vfork(2) counts as stopped if it will stop afterwards. *Source*:
    proc_pid_status(5).
    """
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/status", encoding="utf-8", errors="replace") as f:
                shown = dict(line.split(":", 1) for line in f if ":" in line)
            state = shown["State"].split()[0]
            pending = int(shown["SigPnd"], 16) | int(shown["ShdPnd"], 16)
            if state not in "TtZX" and not (state == "D" and pending & STOPPING):
                return False
    return True


def _take_over(process: int, epoch: int, descriptors: list[int]) -> None:
    """Send the streams `descriptors` of its next host to the guest whose first process has the
    descriptor `process`.

    The sender is a process of this host in the sandbox's user and network namespaces. In the
    sandbox, it has the user root and no process id.
    """
    if len(descriptors) != len(STREAMS) - 1:
        raise Refused("failed", "a takeover has an input and an output")
    ours, theirs = socket.socketpair()
    helper = os.fork()
    if helper == 0:
        try:
            sandbox.join(process, sandbox.CLONE_NEWUSER | sandbox.CLONE_NEWNET)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.settimeout(PATIENCE_S)
                end.connect(TAKEOVER)
                sent = [*descriptors, theirs.fileno()]
                socket.send_fds(end, [str(epoch).encode()], sent)
            os._exit(0)
        finally:
            os._exit(1)
    ours.close()
    theirs.close()
    if os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) != 0:
        raise Refused("failed", "the guest could not be reached")


def _enter_user_namespace(directory: str) -> None:
    """Move this process into the user namespace of an earlier launcher, if a sandbox of it still
    runs, or otherwise into a new one.
    """
    for name in os.listdir(directory):
        if name.endswith(".json"):
            with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
                with open(f"{directory}/{name}", encoding="utf-8") as opened:
                    found = json.load(opened)
                if found["exit_code"] is not None:
                    continue
                if found["pid"] and _began(found["pid"]) == found["began"]:
                    ids.join_user_namespace(found["pid"])
                    return
                if found["starter"]:  # it was being started
                    for pid in _named(importlib.import_module(found["starter"]), found["name"]):
                        ids.join_user_namespace(pid)
                        return
    ids.enter_user_namespace()


def main() -> None:
    """Serve requests in a new process, unless another launcher serves the same directory. This
    process ends when the socket exists.
    """
    config = json.loads(sys.argv[1])
    os.umask(0o077)
    try:
        if not ids.may_make_namespaces():
            _enter_user_namespace(config["directory"])
    except (ids.NoIds, OSError) as error:
        sys.exit(f"{error}")
    os.chdir(config["directory"])  # so that the path of the socket is short
    lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    keyctl = KEYCTL.get(platform.machine())
    if keyctl is not None:  # the engine's session may have keys
        with contextlib.suppress(OSError):
            kernel.syscall(keyctl, JOIN_SESSION_KEYRING, 0)
    with contextlib.suppress(FileNotFoundError):
        os.unlink("socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("socket")
    listener.listen(64)
    listener.setblocking(False)
    if os.fork():
        os._exit(0)  # the engine waits for this, and the launcher is nobody's child
    os.setsid()
    Launcher(config["directory"], listener, config["idle_s"]).serve()


if __name__ == "__main__":
    main()
