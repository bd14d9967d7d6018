"""Operations on the files of a session's workspace for the session's owner: list, read, write,
delete, unpack.

Guest side. This is a program that runs in a separate child. It runs as the same unprivileged user
as the session's programs, but none of their code runs in it. Every path is walked by descriptors,
one name at a time, without following links. Only plain files are read and written. If an operation
is refused, this is a normal answer and not a failure, because the session's programs may have left
anything in the workspace.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fumehood.guest.container.places import WORKSPACE
from fumehood.guest.container.request import fed_pieces, read_row
from fumehood.guest.container.survey import KINDS, Survey, hold_to
from fumehood.guest.container.walk import (
    DIRECTORY_FLAGS,
    MAX_ANSWER_BYTES,
    NEW_FLAGS,
    UPLOAD_PREFIX,
    Refused,
    directory_at,
    empty,
    is_nameable,
    new_file,
    open_plain,
    parent_of,
    status_of,
)
from fumehood.guest.core.children import field
from fumehood.guest.core.children import status as process_status
from fumehood.guest.core.pipes import held, write_all
from fumehood.protocol.framing import MAX_DIRECTORY_DEPTH, MAX_REPORT_CHARACTERS, MAX_TIME_NS

if TYPE_CHECKING:
    import tarfile

PLAIN_TYPES = (b"0", b"\0", b"5")
"""The types that plain files and directories have in a tar archive."""

BLOCK_BYTES = 512
CHUNK_BYTES = 1 << 20

OTHERS_BYTES = 32 * 1024
"""Maximum size of the paths of links and special files in one answer, in bytes."""

RECENT_NS = 20_000_000
"""Nanoseconds within which a file can change twice while its change time stays the same. The
kernel's clock for files ticks every 4 to 10 ms.
"""

TIMED = frozenset({"ext4", "9p"})
"""File systems that update a file's change time whenever a program begins to write through a memory
map. They are the file systems of disks: ext4 without gVisor, and 9p with gVisor. tmpfs is not one
of them: it does not update the change time if the program has read the page before.
"""

PROC = "/proc"
MOUNTS = "/proc/self/mounts"

_TOKEN = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = re.compile(rf"{re.escape(UPLOAD_PREFIX)}(new-)?{_TOKEN.pattern}")

Result = dict[str, Any]


def run(arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Carry out the operation `arguments["do"]` with the other arguments.

    Return the exit code, which is always 0, and the claim, which contains the result or the
    refusal.
    """
    try:
        result = _VERBS[arguments["do"]](arguments)
    except Refused as refusal:
        result = {"fault": {"kind": refusal.kind, "message": str(refusal)}}
    except OSError as error:
        kind = "no_room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "invalid"
        message = f"The workspace refused it: {error.strerror}."
        if kind == "no_room":
            message = "The workspace is full."
        result = {"fault": {"kind": kind, "message": message}}
    return 0, {"result": result}


def _list(arguments: Result) -> Result:
    path, most = arguments["path"], int(arguments["most"])
    after = str(arguments.get("after") or "")
    entries: list[Result] = []
    room = MAX_ANSWER_BYTES
    for entry in _found(path, bool(arguments["recursive"])):
        if entry["path"] <= after:
            continue
        room -= len(json.dumps(entry)) + 2
        if len(entries) >= most or room < 0:
            return {"entries": entries, "has_more": True}
        entries.append(entry)
    return {"entries": entries, "has_more": False}


def _found(path: str, recursive: bool) -> list[Result]:
    """Return the entries in the directory `path`, sorted by path. If `recursive` is True, include
    the entries of its subdirectories at all depths. If `path` is a file, return only this file.
    """
    if path:
        with parent_of(path) as (directory, name):
            status = status_of(name, directory, path)
            if not stat.S_ISDIR(status.st_mode):
                return [_entry(path, status)]
    with directory_at(path) as directory:
        prefix = f"{path}/" if path else ""
        found = _below(directory, prefix, MAX_DIRECTORY_DEPTH if recursive else 0)
        return sorted((_entry(*one) for one in found), key=lambda entry: entry["path"])


def _scan(arguments: Result) -> Result:
    """List the files and directories of the workspace, sorted by path. The list begins after the
    path `after`.

    Each row has four values: the path, the size in bytes, whether the file can be executed, and the
    version. A directory has the size -1. All rows together have at most `room` bytes. If more rows
    follow, `has_more` is True. If the workspace has more than `most` entries, `too_many` is True,
    and there are no rows.

    A file's version changes whenever the file changes:

    * On tmpfs, it is the SHA-256 of the content. If the file cannot be read, it is "".
    * On a disk, it is the inode and the change time. If the file could change while these stay the
      same, it is "".

    `others` are the paths of links and special files, paths that the host cannot name, and
    directories that cannot be read. If `links` is True, links have rows instead, with the size -2
    and their target as the version. Directories with a name in `skip` are left out, with all that
    is in them.
    """
    after, most, room = arguments["after"], int(arguments["most"]), int(arguments["room"])
    result: Result = {"rows": [], "has_more": False, "too_many": False, "others": []}
    has_links, skip = bool(arguments.get("links")), frozenset(arguments.get("skip") or ())
    found: list[tuple[str, os.stat_result]] = []
    unseen: list[str] = []
    with directory_at("") as top:
        for path, status in _below(top, "", MAX_DIRECTORY_DEPTH, unseen, skip):
            if len(found) >= most:
                return {**result, "too_many": True}
            found.append((path, status))
    rows: list[list[Any]] = result["rows"]
    others = [ascii(name)[:MAX_REPORT_CHARACTERS] for name in unseen]
    with _versions() as version_of:
        for path, status in sorted(found, key=lambda one: one[0]):
            if path <= after:
                continue
            target = _target(path) if has_links and stat.S_ISLNK(status.st_mode) else None
            is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
            if not is_plain and target is None:
                others.append(path)
                continue
            row: list[Any] = [path, -1, True, ""] if target is None else [path, -2, False, target]
            if stat.S_ISREG(status.st_mode):
                can_run = bool(status.st_mode & stat.S_IXUSR)
                row = [path, status.st_size, can_run, version_of(path, status)]
            room -= len(json.dumps(row)) + 2
            if room < 0:
                result["has_more"] = True
                break
            rows.append(row)
    spare = OTHERS_BYTES  # separate, so that `others` cannot take the room of rows
    for name in others:
        spare -= len(json.dumps(name)) + 2
        if spare < 0:
            break
        result["others"].append(name)
    return result


def _target(path: str) -> str | None:
    """Return the target of the link `path`, or None if the host cannot name the target."""
    with parent_of(path) as (directory, name):
        target = os.readlink(name, dir_fd=directory)
    return target if is_nameable(target) else None


@contextmanager
def _versions() -> Iterator[Callable[[str, os.stat_result], str]]:
    """Yield a function that returns the version of a file, given the file's path and status. It
    returns "" if the file has no version (see `_scan`).

    The function is fastest if the files are sorted by directory.
    """
    if _is_timed():
        mapped = _mapped()
        recent = time.clock_gettime_ns(time.CLOCK_REALTIME) - RECENT_NS

        def by_times(path: str, status: os.stat_result) -> str:
            inode, changed_ns = status.st_ino, status.st_ctime_ns
            is_settled = changed_ns < recent and mapped is not None and inode not in mapped
            return f"{inode}:{changed_ns}" if is_settled else ""

        yield by_times
        return
    with directory_at("") as top:
        room = os.fstatvfs(top)
    left = room.f_blocks * room.f_frsize  # maximum size of all files, not counting holes

    with _LastDirectory(make=False) as parents:

        def by_content(path: str, status: os.stat_result) -> str:
            nonlocal left
            left -= status.st_size
            above, _, name = path.rpartition("/")
            with suppress(Refused, OSError):
                if left >= 0:
                    return _digest_of(open_plain(name, parents.at(above), path))
            return ""

        yield by_content


def _is_timed() -> bool:
    """Whether the workspace is on a file system whose change times show every write."""
    with open(MOUNTS, errors="replace") as file:
        mounts = [line.split(" ") for line in file]
    return any(mount[1] == WORKSPACE and mount[2] in TIMED for mount in mounts)


def _mapped() -> set[int] | None:
    """Return the inodes of the files that processes have mapped into shared memory, for reading or
    writing.

    Return None if a process of the session's programs hides its maps.
    """
    # A process can write to a mapped file again without changing the file's times. A map counts
    # even if it is not writable now, because a process can change the access rights unnoticed.
    found = set()
    for process in filter(str.isdigit, os.listdir(PROC)):
        maps = _maps_of(process)
        if not maps and _is_ours(process):
            return None
        for line in maps.splitlines():
            _, rights, _, _, inode = line.split(maxsplit=5)[:5]
            if rights[3] == "s":
                found.add(int(inode))
    return found


def _maps_of(process: str) -> str:
    """Return the memory maps of the process with the id `process`. Return "" if it has ended or
    hides its maps.
    """
    # All threads share the maps, but a thread that has ended shows none, and the first thread may
    # end before the others.
    with suppress(OSError):
        for thread in os.listdir(f"{PROC}/{process}/task"):
            with (
                suppress(OSError),
                open(f"{PROC}/{process}/task/{thread}/maps", errors="replace") as file,
            ):
                if maps := file.read():
                    return maps
    return ""


def _is_ours(process: str) -> bool:
    """Whether the process with this id runs as the user of the session's programs and has not
    ended.
    """
    shown = process_status(process)
    has_ended = (field(shown, b"State") or b"X")[:1] in b"ZX" and field(shown, b"Threads") == b"1"
    users = (field(shown, b"Uid") or b"").split()
    return b"%d" % os.getuid() in users and not has_ended


def _fill(arguments: Result) -> Result:
    """Create directories, and write parts of files. Return the number of bytes written. The caller
    must ensure that no program has run in this workspace.

    `arguments["directories"]` are the paths of the directories. Each item of `arguments["parts"]`
    has a path, an offset, whether the file can be executed, and content in base64.
    """
    for path in arguments["directories"]:
        with directory_at(path, make=True):
            pass
    size = 0
    for path, offset, can_run, content_base64 in arguments["parts"]:
        content = base64.b64decode(content_base64)
        with parent_of(path, make=True) as (directory, name):
            descriptor = _open_piece(name, directory, path, offset)  # written in place
        with held(descriptor):
            os.fchmod(descriptor, 0o755 if can_run else 0o644)
            write_all(descriptor, content)
        size += len(content)
    return {"size": size}


def _take(arguments: Result) -> Result:
    """Create the files, directories and links that the host sends after the request. Return their
    number, and the total size of the files. The caller must ensure that no program has run in this
    workspace.

    For each of them, the host sends a row with five values: the path, the size, whether the file
    can be executed, the modification time in microseconds, and a link's target. The size is -1 for
    a directory, and -2 for a link. After the row of a file, the host sends its content. After the
    last entry, the host sends null.
    """
    count = size = 0
    with _LastDirectory(make=True) as parents:
        while (row := read_row()) is not None:
            path, length, can_run, modified_us, target = row
            count += 1
            if length == -1:
                with directory_at(path, make=True):
                    continue
            above, _, name = path.rpartition("/")
            directory = parents.at(above)
            if length == -2:
                os.symlink(target, name, dir_fd=directory)
                continue
            mode = 0o755 if can_run else 0o644
            with held(os.open(name, NEW_FLAGS, mode, dir_fd=directory)) as descriptor:
                for piece in fed_pieces(length):
                    write_all(descriptor, piece)
                os.utime(descriptor, ns=(modified_us * 1000, modified_us * 1000))
            size += length
    return {"files": count, "size": size}


def _open_piece(name: str, directory: int, path: str, offset: int) -> int:
    """Open a file, so that its next piece can be written at the end, and return the descriptor. If
    `offset` is 0, create the file.

    `name` is the file's name in the open directory `directory`. `path` is the whole path, for
    messages.
    """
    if offset == 0:
        return os.open(name, NEW_FLAGS, 0o644, dir_fd=directory)
    return open_plain(name, directory, path, os.O_WRONLY | os.O_APPEND)


class _LastDirectory:
    """Opens directories, and keeps the last one open. This saves time if successive files are in
    the same directory.

    The method `at` returns the descriptor of a directory. It stays open until `at` is called for
    another directory. If `make` is True, missing directories are created.
    """

    def __init__(self, *, make: bool) -> None:
        self._make = make
        self._path: str | None = None
        self._held = ExitStack()

    def __enter__(self) -> _LastDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def at(self, path: str) -> int:
        if path != self._path:
            self._held.close()
            self._path = None
            self._descriptor = self._held.enter_context(directory_at(path, make=self._make))
            self._path = path
        return self._descriptor


def _digest(arguments: Result) -> Result:
    """Return the SHA-256 of each of the files `paths`, in this order. It is None for a file that
    cannot be read.
    """
    digests: list[str | None] = []
    for path in arguments["paths"]:
        try:
            with parent_of(path) as (directory, name):
                digests.append(_digest_of(open_plain(name, directory, path)))
        except (Refused, OSError):
            digests.append(None)
    return {"digests": digests}


def _digest_of(descriptor: int) -> str:
    """Return the SHA-256 of the content of the open file `descriptor`, and close the file."""
    digest = hashlib.sha256()
    with held(descriptor):
        while chunk := os.read(descriptor, CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _below(
    directory: int,
    prefix: str,
    depth: int,
    unseen: list[str] | None = None,
    skip: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the status of each entry below the open directory `directory`.

    `prefix` is the directory's path with a slash at the end, or "" for the workspace. `depth` is
    the number of levels of subdirectories to enter.

    Uploads are left out, and entries that the host cannot name. If this process may not read the
    status of an entry, this entry and the rest of its directory are left out. The paths of uploads
    and of such entries are added to `unseen`, but not those of the rest. The paths of directories
    that cannot be entered, or are too deep, are also added. Directories with a name in `skip` are
    left out, and not added.
    """
    unseen = [] if unseen is None else unseen
    for name in os.listdir(directory):
        if name.startswith(UPLOAD_PREFIX) or not is_nameable(prefix + name):
            unseen.append(prefix + name)
            continue
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:  # a registered process has removed it
            continue
        except PermissionError:  # the owner has removed its own permission
            unseen.append(prefix + name)
            return
        if name in skip and stat.S_ISDIR(status.st_mode):
            continue
        yield prefix + name, status
        if stat.S_ISDIR(status.st_mode) and not depth:
            unseen.append(f"{prefix}{name}/")
        if depth and stat.S_ISDIR(status.st_mode):
            try:
                inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            except OSError:
                unseen.append(f"{prefix}{name}/")
                continue
            with held(inner):
                yield from _below(inner, f"{prefix}{name}/", depth - 1, unseen, skip)


def _entry(path: str, status: os.stat_result) -> Result:
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "other")
    return {
        "path": path,
        "kind": kind,
        "size": status.st_size if kind == "file" else 0,
        "modified_ns": max(-MAX_TIME_NS, min(status.st_mtime_ns, MAX_TIME_NS)),
    }


def _read(arguments: Result) -> Result:
    path, offset = arguments["path"], int(arguments["offset"])
    with parent_of(path) as (directory, name):
        descriptor = open_plain(name, directory, path)
    with held(descriptor):
        status = os.fstat(descriptor)
        length = int(arguments["length"])
        content = bytearray()
        while len(content) < length and (
            chunk := os.pread(descriptor, length - len(content), offset + len(content))
        ):
            content += chunk
    return {
        "content_base64": base64.b64encode(content).decode("ascii"),
        "size": status.st_size,
        "version": f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}",
        "executable": bool(status.st_mode & stat.S_IXUSR),
    }


def _read_closed(arguments: Result) -> Result:
    """Read a file as `_read` does, even if its permissions do not allow this. This process runs as
    the file's owner, and adds the missing permission while it reads.
    """
    path = arguments["path"]
    with parent_of(path) as (directory, name):
        mode = stat.S_IMODE(status_of(name, directory, path).st_mode)
        if mode & stat.S_IRUSR:
            return _read(arguments)
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", mode | stat.S_IRUSR)
            return _read(arguments)
        finally:
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
            os.close(descriptor)


def _read_many(arguments: Result) -> Result:
    """Read the whole files `paths`, in this order, until the next one does not fit. The contents
    together have at most `length` bytes.

    In the result, a file that cannot be read is None.
    """
    room = int(arguments["length"])
    pieces: list[Result | None] = []
    for path in arguments["paths"]:
        try:
            piece = _read_closed({"path": path, "offset": 0, "length": room})
        except (Refused, OSError):
            pieces.append(None)
            continue
        room -= piece["size"]
        if room < 0:
            break
        pieces.append(piece)
    return {"pieces": pieces}


def _write(arguments: Result) -> Result:
    """Write a file.

    If the request has `expected`, this is a hash of the state that an earlier preview of this write
    has shown. If the state has changed since then, nothing is written.
    """
    path, mode = arguments["path"], arguments["mode"]
    if "expected" in arguments:
        for refused in hold_to(arguments).values():
            raise Refused(refused.fault or "invalid", refused.message)
    content = base64.b64decode(arguments["content_base64"])
    with parent_of(path, make=True) as (directory, name):
        if mode == "append":
            return _append(directory, name, path, content)
        with new_file(directory) as (descriptor, temporary):
            write_all(descriptor, content)
            _put_in_place(temporary, directory, name, directory, path, mode)
    return {"size": len(content)}


def _append(directory: int, name: str, path: str, content: bytes) -> Result:
    try:
        descriptor = open_plain(name, directory, path, os.O_WRONLY | os.O_APPEND)
    except Refused as refusal:
        if refusal.kind != "not_found":
            raise
        descriptor = os.open(name, NEW_FLAGS, 0o644, dir_fd=directory)
    with held(descriptor):
        before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, content)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    return {"size": before + len(content)}


def _put(arguments: Result) -> Result:
    """Append `content_base64` to an upload, which must have the size `offset`. Until it is
    complete, an upload is a hidden file in the top directory.
    """
    name, offset = _upload(arguments), int(arguments["offset"])
    content = base64.b64decode(arguments["content_base64"])
    with directory_at("") as top, held(_open_piece(name, top, "upload", offset)) as descriptor:
        if os.fstat(descriptor).st_size != offset:
            raise Refused("changed", "The upload was changed by a program of the session.")
        write_all(descriptor, content)
    return {"size": offset + len(content)}


def _finish(arguments: Result) -> Result:
    name, path, size = _upload(arguments), arguments["path"], int(arguments["size"])
    with directory_at("") as top:
        try:
            status = status_of(name, top, "upload")
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise Refused("changed", "The upload was changed by a program of the session.")
            with parent_of(path, make=True) as (directory, target):
                _put_in_place(name, top, target, directory, path, arguments["mode"])
        except BaseException:
            _drop_quietly(name, top)
            raise
    return {"size": size}


def _unpack(arguments: Result) -> Result:
    """Unpack a complete upload, which is a tar archive, into the directory `path`. Before that,
    check all of its members.

    Return the number of files and their total size. The upload is removed, even if this function
    fails.
    """
    import tarfile  # it would take memory in every container

    name, path = _upload(arguments), str(arguments["path"])
    with directory_at("") as top:
        try:
            with os.fdopen(open_plain(name, top, "upload"), "rb") as file:
                if os.fstat(file.fileno()).st_size != int(arguments["size"]):
                    raise Refused("changed", "The upload was changed by a program of the session.")
                try:
                    with tarfile.open(fileobj=file, mode="r:") as archive:
                        members = _members(archive)
                        file.seek(archive.offset)
                        # `tarfile` accepts an archive without an end.
                        if file.read(BLOCK_BYTES) != bytes(BLOCK_BYTES):
                            raise Refused("archive", "it is cut off")
                        for member, inner in members:
                            _unpack_one(archive, member, f"{path}/{inner}".strip("/"))
                except (Refused, OSError, MemoryError):
                    raise
                except Exception as error:  # `tarfile` raises many types for broken archives
                    raise Refused("archive", f"it is broken: {str(error)[:100]}") from None
        finally:
            _drop_quietly(name, top)
    files = [member.size for member, _ in members if member.isreg()]
    return {"files": len(files), "size": sum(files)}


def _members(archive: tarfile.TarFile) -> list[tuple[tarfile.TarInfo, str]]:
    """Return the members of an archive with their paths.

    Raises Refused if a member is neither a plain file nor a directory, or if its path is not
    allowed. A path must be below the archive's root, for example.
    """
    members: list[tuple[tarfile.TarInfo, str]] = []
    for member in archive:
        shown = ascii(member.name)[:MAX_REPORT_CHARACTERS]
        if member.type not in PLAIN_TYPES or member.sparse is not None or member.size < 0:
            raise Refused("archive", f"{shown} is no plain file or directory")
        path = member.name.removeprefix("./").rstrip("/")
        names = path.split("/")
        if path not in ("", ".") and (
            any(part in ("", ".", "..") for part in names)
            or len(names) > MAX_DIRECTORY_DEPTH
            or not is_nameable(path)
            or "\0" in path
        ):
            raise Refused("archive", f"{shown} is no plain relative path")
        if names[-1].startswith(UPLOAD_PREFIX):
            raise Refused("archive", f"{shown} is the name of an unfinished upload")
        members.append((member, "" if path == "." else path))
    files = {path for member, path in members if not member.isdir()}
    directories = {path for member, path in members if member.isdir()}
    for path in [*files, *directories]:
        while path := path.rpartition("/")[0]:
            directories.add(path)
    for path in files & directories:
        raise Refused("archive", f"{ascii(path)[:MAX_REPORT_CHARACTERS]} is a file and a directory")
    return members


def _unpack_one(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    if member.isdir():
        with directory_at(path, make=True):
            return
    source = archive.extractfile(member)
    assert source is not None
    with parent_of(path, make=True) as (directory, name):
        mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
        with new_file(directory, mode) as (descriptor, temporary):
            while chunk := source.read(CHUNK_BYTES):  # raises if the archive is cut off
                write_all(descriptor, chunk)
            _put_in_place(temporary, directory, name, directory, path, "replace")


def _drop(arguments: Result) -> Result:
    with directory_at("") as top:
        _drop_quietly(_upload(arguments), top)
    return {}


def _sweep(arguments: Result) -> Result:
    """Remove the unfinished files of interrupted writes and, if `uploads` is True, those of
    interrupted uploads. Return their number.

    The caller must ensure that no write is in progress and, if `uploads` is True, no upload.
    """
    with directory_at("") as top:
        return {"removed": _sweep_below(top, bool(arguments["uploads"]), MAX_DIRECTORY_DEPTH)}


def _sweep_below(directory: int, uploads: bool, depth: int) -> int:
    removed = 0
    for name in os.listdir(directory):
        # A registered process may have removed the file, or a directory may be inaccessible.
        with suppress(FileNotFoundError, PermissionError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            unfinished = _UNFINISHED.fullmatch(name)
            if stat.S_ISDIR(status.st_mode):
                if depth:
                    with held(os.open(name, DIRECTORY_FLAGS, dir_fd=directory)) as inner:
                        removed += _sweep_below(inner, uploads, depth - 1)
            elif stat.S_ISREG(status.st_mode) and unfinished and (uploads or unfinished[1]):
                os.unlink(name, dir_fd=directory)
                removed += 1
    return removed


def _drop_quietly(name: str, top: int) -> None:
    try:
        os.unlink(name, dir_fd=top)
    except FileNotFoundError:
        pass


def _survey(arguments: Result) -> Result:
    return Survey(arguments["of"]).told(int(arguments["most"]))


def _delete(arguments: Result) -> Result:
    """Delete the entries `paths`. Return which of them were deleted, which are missing, and which
    could not be deleted.

    If the request has `expected`, this is a hash of the state that an earlier preview of this
    deletion has shown. If the state has changed since then, nothing is deleted. Paths that the
    preview showed as not deletable are not deleted.
    """
    refused = hold_to(arguments) if "expected" in arguments else {}
    deleted: list[str] = []
    missing: list[str] = []
    failed: list[Result] = []
    for path in arguments["paths"]:
        try:
            if path in refused:
                raise Refused(refused[path].fault or "invalid", refused[path].message)
            with parent_of(path) as (directory, name):
                _remove(name, directory, path, bool(arguments["recursive"]))
            deleted.append(path)
        except Refused as refusal:
            if refusal.kind == "not_found":
                missing.append(path)
            else:
                failed.append({"path": path, "why": str(refusal)})
        except OSError as error:
            failed.append({"path": path, "why": error.strerror or "it was refused"})
    return {"deleted": deleted, "missing": missing, "failed": failed}


def _remove(name: str, directory: int, path: str, recursive: bool) -> None:
    """Remove the entry `name` of the open directory `directory`. `path` is the whole path, for
    messages.

    If the entry is a link, only the link is removed, never its target. If it is a directory that is
    not empty, it is only removed if `recursive` is True.
    """
    status = status_of(name, directory, path)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=directory)
        return
    if recursive:
        os.chmod(name, 0o700, dir_fd=directory)
        with held(os.open(name, DIRECTORY_FLAGS, dir_fd=directory)) as inner:
            empty(inner)
    try:
        os.rmdir(name, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise Refused("not_empty", "The directory is not empty.") from None


def _put_in_place(
    name: str, directory: int, target: str, target_directory: int, path: str, mode: str
) -> None:
    if mode == "create":
        try:
            os.link(
                name, target, src_dir_fd=directory, dst_dir_fd=target_directory,
                follow_symlinks=False,
            )  # fmt: skip
        except FileExistsError:
            raise Refused("exists", f"There is already a {path}.") from None
        os.unlink(name, dir_fd=directory)
        return
    try:
        found = os.stat(target, dir_fd=target_directory, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            kind = "link" if stat.S_ISLNK(found.st_mode) else "not_a_file"
            raise Refused(kind, f"{path} is there and is not a plain file.")
    except FileNotFoundError:
        pass
    os.rename(name, target, src_dir_fd=directory, dst_dir_fd=target_directory)


def _upload(arguments: Result) -> str:
    token = str(arguments["token"])
    if not _TOKEN.fullmatch(token):
        raise Refused("invalid", "An upload is named by 32 hexadecimal digits.")
    return f"{UPLOAD_PREFIX}{token}"


_VERBS: dict[str, Callable[[Result], Result]] = {
    "list": _list,
    "scan": _scan,
    "fill": _fill,
    "take": _take,
    "digest": _digest,
    "read": _read,
    "read_closed": _read_closed,
    "read_many": _read_many,
    "write": _write,
    "put": _put,
    "finish": _finish,
    "unpack": _unpack,
    "drop": _drop,
    "sweep": _sweep,
    "delete": _delete,
    "survey": _survey,
}
