"""Disks of sessions: file systems of fixed size, each in a file of the state directory.

Host side, for the container wall. A disk is an ext4 file system in a file with a loop device, which
the container runtime mounts. So the operating system enforces the size and the number of files of
the disk, and the disk can be deleted quickly. The engine must run as root on the containers' host
for this. Invariants: all space of a disk is allocated when the disk is made, so no program's write
fails because others have filled the host; if an engine is killed while it makes or removes a disk,
`sweep` of a later engine removes the remains; programs never write to the file or the device, only
through the mounted file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.limits import MB
from fumehood.sandbox.container.runtime import Runtime, RuntimeConflict, RuntimeFault
from fumehood.sandbox.container.spec import INODES_PER_MB
from fumehood.sandbox.wall import OnEvent, try_later

LOOP_GET_STATUS64 = 0x4C05
LOOP_CLR_FD = 0x4C01
LOOP_INFO64_BYTES = 232
"""Size in bytes of a loop device's status. It begins with the device and the inode of the file, 64
bits each. *Source*: linux/loop.h.
"""

PROGRAMS = ("mkfs.ext4", "debugfs", "e2fsck", "losetup", "blockdev", "cp")
SEARCH_PATH = f"{os.defpath}:/usr/sbin:/sbin"

RUN_S = 20.0
"""Maximum seconds for a run of one of `PROGRAMS`. Usually, a run takes about 10 ms."""

COPY_S_PER_GB = 60.0
"""Seconds that are added to `RUN_S` for each GB of data that is copied."""

COPY = "snap_"
"""Prefix of the names of copies of disks. Copies are never attached, so they do not grow."""

SPARED_BYTES = 1 << 30
"""Number of bytes of the host's file system that are never reserved for disks."""

FAILURES = (OSError, subprocess.SubprocessError, RuntimeFault)
"""Exceptions that an operation on a disk may raise."""

CHECK = "[problems]\n" + "".join(
    f"\t{problem} = {{\n\t\tpreen_ok = true\n\t\tno_ok = true\n\t\tforce_no = true\n\t}}\n"
    for problem in ("0x030004", "0x030017")
)
"""Configuration of `e2fsck`. With it, `e2fsck` neither makes nor needs `lost+found`. Otherwise a
program could make the disk unusable by creating a file with this name, or by leaving no room for
it. *Source*: e2fsck.conf(5), and problem.h: PR_3_NO_LF_DIR, PR_3_LPF_NOTDIR.
"""

LAY_OUT = "rmdir lost+found\nset_inode_field / mode 041777\n"
"""Commands for `debugfs` in a new file system. Afterwards, all users may write into the root
directory, as into /tmp, but only root can change this directory itself.
"""


class Disks:
    """The disks of sessions, as files in one directory of the engine's state. If the engine has no
    state directory, no disks can be made.
    """

    def __init__(
        self,
        directory: Path | None,
        runtime: Runtime,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self._on_event = on_event
        self._reserved: dict[str, int] = {}
        """Name of each disk or copy that is being made → number of bytes that are reserved for
        it.
        """
        self._directory = directory
        self._runtime = runtime
        self._turn = anyio.Lock()
        """A lock. It is held while space is reserved or allocated."""

    def why_none(self) -> str | None:
        """Return a clause that says why this engine cannot make disks, or None if it can."""
        if self._directory is None:
            return "an engine without a state directory has none"
        if os.geteuid() != 0:
            return "only an engine that runs as root can make one"
        if not self._runtime.is_local:
            return f"{self._runtime.name} is on another host"
        missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
        if missing:
            return f"this host lacks {' and '.join(missing)} (Debian: e2fsprogs, mount)"
        return None

    async def make(self, name: str, mb: int) -> None:
        """Make a disk of `mb` MB, and attach it.

        Raises:
            SandboxUnavailable: there is no room, or the disk could not be made. Nothing of the disk
                is left.
        """
        assert self._directory is not None
        path = self._directory / name
        async with self._for_callers(name, "made"), self._new(name, mb * MB):
            await self._give_all_its_room(path, mb * MB)
            await _run(
                "mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", "-N", str(mb * INODES_PER_MB),
                "-E", "nodiscard", str(path),
            )  # fmt: skip
            await _run("debugfs", "-w", "-f", "-", str(path), told=LAY_OUT)
            await self._attach(name)

    @asynccontextmanager
    async def _for_callers(
        self,
        name: str,
        what: str,
        *,
        unless: tuple[type[RuntimeFault], ...] = (),
    ) -> AsyncIterator[None]:
        """If an operation of the container runtime or of the host fails in the block, log the
        failure and raise SandboxUnavailable. Its message states the cause for callers, without
        names or paths of the host.

        `name` is the disk's name for the log. `what` completes the sentence "The disk could not be
        …", for example "copied". Failures of the types in `unless` are not logged, and are raised
        unchanged.
        """
        try:
            yield
        except FAILURES as error:
            if isinstance(error, unless):
                raise
            said = getattr(error, "stderr", None) or b""
            why = f"{error!r} {said.decode('utf-8', 'replace')}"
            self._on_event("disk.failed", {"disk": name, "not": what, "why": why})
            words = f"The session's disk could not be {what}: {_cause(error)}. Repeat the request."
            raise try_later(words) from error

    @asynccontextmanager
    async def _new(self, name: str, room: int) -> AsyncIterator[None]:
        """Create the empty file of the new disk `name`. During the block, reserve `room` bytes of
        the host's space for the disk. If the block fails, remove the disk.

        Raises:
            SandboxUnavailable: there is no room.
            OSError: the file could not be created, or already exists. An existing file is not
                changed.
        """
        assert self._directory is not None
        async with self._turn:
            await anyio.to_thread.run_sync(self._promise, self._directory / name, room)
            self._reserved[name] = room
        try:
            yield
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._try_to_remove(name)
            raise
        finally:
            del self._reserved[name]

    async def _give_all_its_room(self, path: Path, size: int) -> None:
        async with self._turn:  # else `_promise` could count the same bytes as reserved and as used
            await anyio.to_thread.run_sync(_allocate, path, size)

    async def copy(self, name: str, target: str) -> int:
        """Copy the disk `name` to a new disk `target`, and return the number of bytes that the copy
        takes on the host. During the copying, no program may write to the disk.

        Raises:
            SandboxUnavailable: there is no room, or the copying failed. Nothing of the copy is
                left.
        """
        assert self._directory is not None
        source, path = self._directory / name, self._directory / target
        async with self._for_callers(target, "copied"):
            for device in await self._devices(source):
                await _run("blockdev", "--flushbufs", device)
            size, taken = await anyio.to_thread.run_sync(_size_and_data, source)
            grows = not target.startswith(COPY)
            deadline_s = RUN_S + COPY_S_PER_GB * taken / (1 << 30)
            async with self._new(target, size if grows else taken):
                await _run(
                    "cp", "--sparse=always", "--reflink=never", "--", str(source), str(path),
                    deadline_s=deadline_s,
                )  # fmt: skip
                if grows:
                    await self._give_all_its_room(path, size)
                found = await anyio.to_thread.run_sync(path.stat)
        return found.st_blocks * 512

    async def prepare(self, source: str, new: str) -> None:
        """Make a copy of the disk `source` with the name `new`, and check its file system.
        Afterwards, `replace` can put the copy in the place of another disk.

        Raises:
            SandboxUnavailable: there is no room, or the copying failed.
        """
        assert self._directory is not None
        await self._try_to_remove(new)  # the remains of a failed attempt
        await self.copy(source, new)
        async with self._for_callers(new, "checked"):
            await _check(str(self._directory / new))

    async def replace(self, name: str, new: str) -> None:
        """Put the disk `new` in the place of the disk `name`. No container may use the disk `name`.

        Raises:
            SandboxUnavailable: the disk could not be replaced, and is unchanged.
        """
        assert self._directory is not None
        async with self._for_callers(name, "replaced"):
            path = await self._detach(name)
            await anyio.to_thread.run_sync((self._directory / new).replace, path)

    def has(self, name: str) -> bool:
        """Whether a disk with this name exists."""
        return self._directory is not None and (self._directory / name).exists()

    async def attach(self, name: str) -> None:
        """Create a loop device for a disk, and attach it to the container runtime, so that a new
        container can use it. This also works after a restart of the host.

        Raises:
            RuntimeConflict: a container still uses the disk.
            SandboxUnavailable: the disk could not be attached. The disk itself is kept.
        """
        async with self._for_callers(name, "attached", unless=(RuntimeConflict,)):
            path = await self._detach(name)
            if await self._devices(path):
                raise RuntimeConflict("A container that ends still uses the disk.")
            await self._attach(name)

    async def _attach(self, name: str) -> None:
        assert self._directory is not None
        path = str(self._directory / name)
        await _check(path)
        device = (await _run("losetup", "--find", "--show", path)).strip()
        await self._runtime.attach_disk(name, device)

    async def _devices(self, path: Path) -> list[str]:
        """Return the names of the loop devices of the disk in the file `path`. An attached disk has
        one, any other disk has none.
        """
        found = await _run("losetup", "--associated", str(path))
        return [line.partition(":")[0] for line in found.splitlines()]

    def _promise(self, path: Path, needed: int) -> None:
        """Create the empty file `path` of a new disk, if the host has enough space for the disk.

        Raises:
            SandboxUnavailable: fewer than `needed` bytes are both free and not reserved for other
                disks.
        """
        assert self._directory is not None
        self._directory.mkdir(mode=0o700, exist_ok=True)
        promised = 0
        for one in self._directory.iterdir():
            try:
                found = one.stat()
            except FileNotFoundError:  # removed after it was listed
                continue
            grows_to = 0 if one.name.startswith(COPY) else found.st_size
            grows_to = self._reserved.get(one.name, grows_to)  # it begins as an empty file
            promised += max(0, grows_to - found.st_blocks * 512)
        room = shutil.disk_usage(self._directory).free - promised - SPARED_BYTES
        if room < needed:
            raise SandboxUnavailable(
                f"The engine's host has no room for {needed // MB} MB: {max(0, room) // MB} MB are "
                "not promised to others.",
                retryable=False,
            )
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    async def detach(self, name: str) -> None:
        """Detach a disk from the container runtime, and release its loop device. The next `attach`
        makes them again. Failures are ignored.
        """
        with suppress(*FAILURES):
            await self._detach(name)

    async def _detach(self, name: str) -> Path:
        assert self._directory is not None
        await self._runtime.detach_disk(name)
        path = self._directory / name
        for device in await self._devices(path):
            await anyio.to_thread.run_sync(_free, device, path)
        return path

    async def remove(self, name: str) -> None:
        """Remove a disk, even if it was made or removed only in part. No container may still use
        it.

        Raises:
            OSError, subprocess.SubprocessError, RuntimeFault: the disk could not be removed.
        """
        (await self._detach(name)).unlink(missing_ok=True)

    async def sweep(self, in_use: Callable[[], Iterable[str]]) -> None:
        """Remove all disks and copies of disks except those whose names `in_use` returns. A disk
        that cannot be removed stays until the next sweep.
        """
        if self._directory is None:
            return
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:
            return
        used = frozenset(in_use())  # read after the list: a name is in use before its disk is made
        for name in names:
            if name not in used:
                await self._try_to_remove(name)

    async def _try_to_remove(self, name: str) -> None:
        with suppress(*FAILURES):
            await self.remove(name)


def _free(device: str, path: Path) -> None:
    """Detach the loop device `device` from the disk whose file is `path`. If the device is still
    mounted, the operating system detaches it once it is unmounted. If the device does not exist, or
    now belongs to another file, do nothing.

    *Source*: loop(4).
    """
    # The operating system may have freed the device when a container ended, and any engine on this
    # host may then have used it for another disk. While the device is open here, it cannot be given
    # to another file.
    try:
        with Path(device).open("rb", buffering=0) as opened:
            found = fcntl.ioctl(opened, LOOP_GET_STATUS64, bytes(LOOP_INFO64_BYTES))
            expected = path.stat()
            if struct.unpack_from("=QQ", found) == (expected.st_dev, expected.st_ino):
                fcntl.ioctl(opened, LOOP_CLR_FD)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):  # free, being freed, or no disk
            raise


def _cause(error: BaseException) -> str:
    """Describe, for callers, the failure `error`: which step failed and how. The description
    contains no names or paths of the host.
    """
    match error:
        case RuntimeFault():
            return error.message.removesuffix(".")
        case subprocess.CalledProcessError():
            return f"{error.cmd} ended with status {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"{error.cmd} took longer than {error.timeout:g} s"
        case OSError(strerror=str(words)):
            return words
    return type(error).__name__


def _allocate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _size_and_data(path: Path) -> tuple[int, int]:
    """Return the size of a file, and how many of its bytes are not in holes."""
    end = data = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest is a hole
                    break
                raise
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            data += end - start
    return size, data


async def _check(path: str) -> None:
    """Check the file system of a disk that is not attached, and repair it if necessary. `path` is
    the disk's file. The file system may be damaged if the disk was in use when it was copied, or
    when its host failed.
    """
    await _run("e2fsck", "-p", path, told=CHECK, most_status=1)  # 1: errors were repaired


async def _run(
    program: str,
    *arguments: str,
    told: str = "",
    most_status: int = 0,
    deadline_s: float = RUN_S,
) -> str:
    """Run a program of the host with these arguments, and return its output. `told` is the
    program's input. Exit statuses up to `most_status` count as success.

    Raises:
        OSError, subprocess.SubprocessError: the program failed, or took longer than `deadline_s`.
    """
    found = shutil.which(program, path=SEARCH_PATH) or program
    with anyio.move_on_after(deadline_s):
        try:
            done = await anyio.run_process(
                [found, *arguments],
                input=told.encode(),
                env={"PATH": SEARCH_PATH, "LC_ALL": "C", "E2FSCK_CONFIG": "/dev/stdin"},
                check=False,
            )
        except ExceptionGroup as group:  # it ended before it had read its input
            raise OSError(f"{program} cannot be used: {group.exceptions}") from group
        if not 0 <= done.returncode <= most_status:
            raise subprocess.CalledProcessError(done.returncode, program, stderr=done.stderr)
        return done.stdout.decode("utf-8", "replace")
    raise subprocess.TimeoutExpired(program, deadline_s)
