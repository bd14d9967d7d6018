"""The writable mounts: what state they are in, the files that a program left, and the removal of
these files.

Guest side. The supervisor inspects the mounts itself. It cannot read or remove their content,
because it runs as root without the capability to bypass permissions. A housekeeper does this. It is
a short-lived process of the programs' user, forked when no process of the program is left, and it
runs only this file. Every path is walked by descriptors, one name at a time, without following
links.
"""

from __future__ import annotations

import base64
import os
import select
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from fumehood.guest.container.places import MOUNTS, WORKSPACE
from fumehood.guest.container.walk import (
    UPLOAD_PREFIX,
    empty,
    is_nameable,
)
from fumehood.guest.core.pipes import held
from fumehood.guest.languages.libraries import PICTURES
from fumehood.protocol.framing import MAX_DIRECTORY_DEPTH

MAX_FILES = 100
MAX_TOTAL_BYTES = 64 << 20
"""Maximum total size in bytes of the files of one run. Files beyond it are counted and left out."""

QUICK_LOOKS = 200
"""Maximum number of entries that the supervisor examines itself. If there are more, it starts a
housekeeper.
"""

BYTES_PER_FILE = 32 << 10
"""Average size in bytes of a file below which the number of files is limited, in directories that
have no file system of their own.
"""

DATA_BYTES = 48 * 1024
"""Maximum number of bytes of a file in one frame."""

Tell = Callable[[dict[str, Any]], None]


def _usage(path: str) -> tuple[int, int, int]:
    """Return the used blocks, used inodes, and total inodes of the file system at `path`."""
    found = os.statvfs(path)
    return found.f_blocks - found.f_bfree, found.f_files - found.f_ffree, found.f_files


class Mounts:
    """The writable mounts, and the state that they had before any run."""

    def __init__(self, paths: Sequence[str] = MOUNTS, *, kept: Sequence[str] = ()) -> None:
        """`paths` are all writable mounts. `kept` are those whose files outlive the container.
        These are never emptied.
        """
        self.paths = tuple(path for path in paths if os.path.ismount(path))
        self.emptied = tuple(path for path in self.paths if path not in kept)
        self._clean = {path: _usage(path) for path in self.emptied}
        self._count_inodes = all(inodes for _, _, inodes in self._clean.values())
        self._table = _mount_table()
        self._changes = select.poll()
        self._watched = open("/proc/self/mounts", "rb")  # noqa: SIM115  # kept as long as this is
        self._changes.register(self._watched, select.POLLPRI)

    def are_clean(self) -> bool:
        """Return whether all mounts except those in `kept` are as they were before any run. This is
        so if the numbers of their used blocks and inodes are unchanged. If a file system does not
        count inodes, all these mounts must be empty instead.
        """
        if not self._count_inodes:
            return not any(os.listdir(path) for path in self.emptied)
        return all(_usage(path) == usage for path, usage in self._clean.items())

    def used_bytes(self) -> int:
        """Return the size in bytes of the files in the directories that are emptied."""
        found = map(os.statvfs, self.emptied)
        return sum((one.f_blocks - one.f_bfree) * one.f_frsize for one in found)

    def are_full(self) -> bool:
        """Whether a mount has no space or no inodes left."""
        for path in self.paths:
            found = os.statvfs(path)
            if found.f_bavail == 0 or (found.f_files and found.f_favail == 0):
                return True
        return False

    def are_the_same(self) -> bool:
        """Return whether the table of mounts is the same as when this object was created. *Source*:
        proc_pid_mounts(5).
        """
        # The table is read only if the operating system signals a change.
        return not self._changes.poll(0) or _mount_table() == self._table


class Folders(Mounts):
    """The writable directories if the host gives no namespaces. They are on one of the host's file
    systems, so that their files are counted one by one, and nobody can mount anything.
    """

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` is the largest permitted size of all their files."""
        self.paths = self.emptied = MOUNTS
        self._limit_bytes = limit_bytes
        self._limit_files = limit_bytes // BYTES_PER_FILE

    def are_clean(self) -> bool:
        """Return whether all directories are empty."""
        return not any(os.listdir(path) for path in self.emptied)

    def are_full(self) -> bool:
        """Whether the files together are larger, or more, than permitted."""
        left_bytes, left_files = self._limit_bytes, self._limit_files
        waiting = [*self.paths]
        while waiting:
            with suppress(OSError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        left_bytes -= entry.stat(follow_symlinks=False).st_blocks * 512
                        left_files -= 1
                        if left_bytes < 0 or left_files < 0:
                            return True
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
        return False

    def used_bytes(self) -> int:
        """Return 0: the files are not in memory."""
        return 0

    def are_the_same(self) -> bool:
        """Return True."""
        return True


def message_queues(path: str = "/dev/mqueue") -> list[str]:
    """Return the names of all POSIX message queues in the container. Return no names if they cannot
    be listed. There should be none, because the system-call filter forbids programs to create them.
    """
    try:
        # A queue would outlive the processes of the run that created it.
        return os.listdir(path)
    except OSError:
        return []


def _mount_table() -> bytes:
    with open("/proc/self/mounts", "rb") as mounts:
        return mounts.read()


def keep_house(run_id: int, tell: Tell, mounts: Sequence[str], since_ns: int | None = None) -> int:
    """Send the results of the run `run_id` to the host, and then empty `mounts`. The results are
    the files of the workspace, if `mounts` contains it, and the figures that the program has drawn.
    Return the number of files that were not sent. `tell` sends one message to the host.

    If `since_ns` is given, send only those files of the workspace that have changed since this
    time. In this case, `mounts` are not emptied, and only the figures are removed.
    """
    handing = _Handing(run_id, tell)
    if WORKSPACE in mounts:
        handing.all_below(WORKSPACE, "file", since_ns or 0)
    if os.path.isdir(PICTURES) and not os.path.islink(PICTURES):
        handing.all_below(PICTURES, "image", 0)
        if since_ns is not None:
            _empty(PICTURES)
    for mount in mounts if since_ns is None else ():
        _empty(mount)
    return handing.left_out


def has_changed(since_ns: int) -> bool:
    """Return whether there may be files to send to the host. These are figures, and files of the
    workspace that have changed since the time `since_ns`. Return True if this is uncertain, for
    example because there are too many files.
    """
    # Only names and times are read. The supervisor has no right to read the content.
    left = QUICK_LOOKS
    waiting = [WORKSPACE]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left -= 1
                    found = entry.stat(follow_symlinks=False)
                    is_directory = stat.S_ISDIR(found.st_mode)
                    if left < 0 or (not is_directory and found.st_ctime_ns >= since_ns):
                        return True
                    if is_directory:
                        waiting.append(entry.path)
        except OSError:
            return True
    return has_figures()


def has_figures() -> bool:
    """Whether a program has drawn figures."""
    return os.path.lexists(PICTURES)


class _Handing:
    """Sends the files of one run, with their content, to the host. Files that exceed the maximum
    number or total size are not sent, but only counted.
    """

    def __init__(self, run_id: int, tell: Tell) -> None:
        self.left_out = 0
        self._run_id = run_id
        self._tell = tell
        self._files = 0
        self._bytes = 0

    def all_below(self, root: str, kind: str, since_ns: int) -> None:
        """Send the plain files below the directory `root` to the host, sorted by path. Only files
        that have changed since the time `since_ns` are sent, and no files in `.git` directories.
        `kind` is the kind that is reported with each file.
        """
        for path, directory, name, found in _walk(root):
            is_old = found.st_ctime_ns < since_ns  # only the kernel sets this time
            is_upload = bool(since_ns) and name.startswith(UPLOAD_PREFIX)
            if is_old or is_upload or "/.git/" in f"/{path}":
                continue
            wanted = (
                stat.S_ISREG(found.st_mode)
                and self._files < MAX_FILES
                and self._bytes + found.st_size <= MAX_TOTAL_BYTES
                and is_nameable(path)
            )
            if wanted and self._one(path, directory, name, found, kind):
                self._files += 1
                self._bytes += found.st_size
            else:
                self.left_out += 1

    def _one(self, path: str, directory: int, name: str, found: os.stat_result, kind: str) -> bool:
        try:
            descriptor = _open(name, directory, found)
        except OSError:
            return False
        try:
            _hand_over(self._run_id, self._tell, path, descriptor, found.st_size, kind)
        finally:
            _close(descriptor, found)
        return True


def _hand_over(run_id: int, tell: Tell, path: str, descriptor: int, size: int, kind: str) -> None:
    tell({"op": "file", "id": run_id, "kind": kind, "path": path, "size": size})
    left = size
    while left and (data := os.read(descriptor, min(left, DATA_BYTES))):
        left -= len(data)
        tell({"op": "data", "id": run_id, "data": base64.b64encode(data).decode("ascii")})


def _walk(root: str) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """Yield everything below the directory `root`, sorted by path: path, descriptor of the entry's
    directory, name, and status. Directories are entered and not yielded. If a directory cannot be
    opened, or is nested too deeply, it is yielded instead.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    open_directories = [("", top, os.fstat(top), _names(top))]
    while open_directories:
        prefix, directory, status, names = open_directories[-1]
        if not names:
            _close(directory, status)
            open_directories.pop()
            continue
        name = names.pop()
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:  # a registered process has removed it
            continue
        below = -1
        if stat.S_ISDIR(found.st_mode) and len(open_directories) < MAX_DIRECTORY_DEPTH:
            with suppress(OSError):
                below = _open(name, directory, found)
        if below >= 0:
            open_directories.append((f"{prefix}{name}/", below, found, _names(below)))
        else:
            yield prefix + name, directory, name, found


def _names(directory: int) -> list[str]:
    """Return the names in an open directory in reverse order, so that `pop` returns them in
    order.
    """
    return sorted(os.listdir(directory), reverse=True)


def _open(name: str, directory: int, found: os.stat_result) -> int:
    """Open the file or directory `name` in `directory` for reading, and return its descriptor.
    `found` is its status. If its mode does not let its owner read it, first change the mode, which
    `_close` restores.

    Raises OSError if it cannot be opened.
    """
    is_directory = stat.S_ISDIR(found.st_mode)
    if _is_closed(found):
        # No process is left that could replace it by a link.
        os.chmod(name, 0o700, dir_fd=directory)
    flags = os.O_DIRECTORY if is_directory else os.O_NONBLOCK
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=directory)


def _close(descriptor: int, found: os.stat_result) -> None:
    if _is_closed(found):
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
    os.close(descriptor)


def _is_closed(found: os.stat_result) -> bool:
    """Whether the mode in `found` forbids the owner to read the file, or to read or enter the
    directory.
    """
    needed = 0o500 if stat.S_ISDIR(found.st_mode) else 0o400
    return found.st_mode & needed != needed


def _empty(path: str) -> None:
    with held(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as top:
        empty(top)
