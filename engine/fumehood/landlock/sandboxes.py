"""The sandboxes of this user, each in a directory of its own.

Host side, blocking: used by the runtime in threads, and by `fumehood doctor`. Invariants: a
sandbox's description is written before anything of it runs, so that the next engine finds all its
processes by its mark; a directory is removed only when none of these is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.direct.ask import launcher_directory
from fumehood.guest.container.processes import has_ended, is_stopped
from fumehood.guest.core.marks import mark_of, marked
from fumehood.landlock import host
from fumehood.landlock.marks import new_mark, new_user
from fumehood.landlock.warden import ENDED, RECORD, began, kill_marked
from fumehood.sandbox.images.recipe import guest_digest, guest_files

VERSION = 1
"""Version of the directories. An engine uses only those of its own version."""

SANDBOX = "sandbox.json"
"""The description that the engine writes; the warden adds `RECORD`."""

STOPPED = "stopped.json"
"""The processes that were stopped to freeze a sandbox."""

START_S = 20.0
STOP_S = 2.0
"""Maximum seconds until a warden has forked, and until all processes of a sandbox are stopped."""

UNKNOWN_STATUS = 255
"""Exit code of a guest whose warden was killed."""


class Gone(Exception):
    """The sandbox does not exist."""


class NotStopped(Exception):
    """The processes of a sandbox do not all stop in time."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox. `exit_code` is None while it runs."""

    name: str
    pid: int
    """Process id of its warden."""
    mark: int
    user: int | None
    image_id: str
    labels: Mapping[str, str]
    exit_code: int | None
    is_paused: bool


def default_home() -> Path:
    """Return the directory of this user's sandboxes."""
    return launcher_directory().with_name(f"landlock-{VERSION}")


class Sandboxes:
    """The sandboxes in the directory `home`."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def start(self, name: str, plan: JsonObject, streams: Sequence[int]) -> None:
        """Start a sandbox with the standard streams `streams`. `plan` has its limits and labels.

        Raises:
            FileExistsError: the name is taken.
            OSError: it cannot be started.
        """
        self._make_home()
        with self._locked():
            user = new_user(self._users()) if os.geteuid() == 0 else None
            folder = self._home / name
            folder.mkdir(mode=0o700)
            mark = new_mark()
            self._describe(folder, {**plan["record"], "mark": mark, "user": user})
            if user is not None:
                os.chown(folder, user, user)
        package = self._guest()
        guest = {
            **plan["guest"], "import_paths": [str(package)],
            "shared": {"folder": str(folder), "mark": mark, "gate_fd": 3},
        }  # fmt: skip
        command = [
            str(host.python()), "-I", "-S", "-B", "-X", "utf8", str(package / "fumehood/guest"),
            json.dumps(guest, sort_keys=True),
        ]  # fmt: skip
        config = {
            "import_paths": [str(Path(__file__).parents[2])], "folder": str(folder), "mark": mark,
            "user": user, "processes": plan["processes"], "rlimits": plan["rlimits"],
            "command": command, "env": plan["env"],
        }  # fmt: skip
        warden = Path(__file__).with_name("warden.py")
        stdin, stdout, stderr = streams
        try:
            subprocess.run(  # noqa: S603 - fixed words and our own paths
                [sys.executable, "-I", "-S", "-B", str(warden), json.dumps(config)],
                stdin=stdin, stdout=stdout, stderr=stderr, cwd="/", env={}, timeout=START_S,
                check=True,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise OSError(f"the warden did not start: {error}") from None

    def find(self, name: str) -> Sandbox:
        """Return a sandbox. If its warden was killed, end it first. Raises Gone."""
        folder = self._home / name
        about = _read(folder / SANDBOX)
        if about is None:
            raise Gone
        record, ended = _read(folder / RECORD) or {}, _read(folder / ENDED)
        pid, since = record.get("pid", 0), record.get("began", 0)
        code = None if ended is None else int(ended["exit_code"])
        is_late = time.time() - (folder / SANDBOX).stat().st_mtime > START_S
        if code is None and (not _runs(pid, since) if record else is_late):
            kill_marked(about["mark"])
            code = int((_read(folder / ENDED) or {"exit_code": UNKNOWN_STATUS})["exit_code"])
        return Sandbox(
            name, pid, about["mark"], about["user"], about["image_id"], about["labels"], code,
            is_paused=code is None and (folder / STOPPED).exists(),
        )  # fmt: skip

    def all(self) -> list[Sandbox]:
        """Return all sandboxes."""
        found = []
        for name in self._names():
            with contextlib.suppress(Gone):
                found.append(self.find(name))
        return found

    def freeze(self, name: str) -> None:
        """Stop all processes of a sandbox. Do nothing if they are stopped.

        Raises:
            Gone: it does not exist.
            NotStopped: a process does not stop; all continue.
        """
        found = self.find(name)
        path = self._home / name / STOPPED
        if found.exit_code is not None or found.is_paused:
            return
        stopped: list[tuple[int, int]] = []
        until = time.monotonic() + STOP_S
        waiting = [found.pid]  # the warden first, so that no process is started meanwhile
        while time.monotonic() < until:
            new = [pid for pid in waiting if pid not in dict(stopped)]
            stopped += [(pid, began(pid)) for pid in new]
            _write(path, stopped)
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            was_last = not new and found.pid in dict(stopped)
            waiting = [pid for pid in marked(found.mark) if not _is_still(pid)]
            if not waiting and was_last:
                return
            if not waiting:  # once more, for a process that had begun before
                time.sleep(0.001)
        self.thaw(name)
        raise NotStopped

    def thaw(self, name: str) -> None:
        """Let the processes continue that `freeze` has stopped. Raises Gone."""
        path = self._home / name / STOPPED
        for pid, since in _read(path) or ():
            with contextlib.suppress(ProcessLookupError):
                if began(pid) == since:
                    os.kill(pid, signal.SIGCONT)
        path.unlink(missing_ok=True)
        self.find(name)

    def remove(self, name: str) -> None:
        """Kill all processes of a sandbox, and remove its directory."""
        try:
            found = self.find(name)
        except Gone:
            _remove(self._home / name)
            return
        with contextlib.suppress(OSError):
            process = os.pidfd_open(found.pid)
            try:  # first, so that no process is started meanwhile
                if mark_of(found.pid) == found.mark:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)
        kill_marked(found.mark)
        _remove(self._home / name)

    def folder_of(self, name: str) -> Path:
        """Return the directory of a sandbox."""
        return self._home / name

    def _make_home(self) -> None:
        # Others must reach the directory of their own sandbox, if the engine is root.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        for folder in (self._home.parent, self._home):
            folder.mkdir(mode=mode, parents=True, exist_ok=True)
        found = self._home.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError("another user can change the directory of the sandboxes")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._home / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _users(self) -> set[int]:
        found = (_read(self._home / name / SANDBOX) for name in self._names())
        return {one["user"] for one in found if one is not None and one["user"] is not None}

    def _names(self) -> list[str]:
        try:
            found = sorted(path.name for path in self._home.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []
        return [name for name in found if not name.startswith((".", "guest-"))]

    def _describe(self, folder: Path, about: JsonObject) -> None:
        _write(folder / SANDBOX, about)

    def _guest(self) -> Path:
        """Return the directory with a copy of the guest, which all sandboxes can read."""
        target = self._home / f"guest-{guest_digest()[:32]}"
        if target.is_dir():
            return target
        new = self._home / f".guest-{os.getpid()}-{time.monotonic_ns()}"
        for path, content in guest_files():
            file = new / "fumehood" / path
            file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            file.write_bytes(content)
        for made in (new, *new.rglob("*")):
            made.chmod(0o755 if made.is_dir() else 0o644)
        subprocess.run(  # noqa: S603 - fixed words and our own paths
            [str(host.python()), "-I", "-S", "-m", "compileall", "-q", str(new)],
            env={}, umask=0o022, stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        try:
            new.rename(target)
        except OSError:  # another engine was faster
            shutil.rmtree(new, ignore_errors=True)
        return target


def _is_still(pid: int) -> bool:
    """Return whether a process is stopped, or has ended."""
    return has_ended(pid) or is_stopped(pid)


def _runs(pid: int, since: int) -> bool:
    """Return whether the process that began at `since` runs. It may have ended, and nobody has
    reaped it yet.
    """
    return began(pid) == since and not has_ended(pid)


def _remove(folder: Path) -> None:
    """Remove a directory. Programs may have taken the rights to their own ones."""
    if os.geteuid() != 0:
        for above, names, _ in os.walk(folder):
            for name in names:
                path = Path(above, name)
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> Any:
    """Return the JSON document in a file, or None if the file is missing."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _write(path: Path, content: object) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.rename(path)
