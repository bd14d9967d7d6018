"""The files and links of a project as values, and the directory on the host that contains them.

Host side. Everything that is read is treated as hostile, because a repository can come from
anywhere. A path is opened one name at a time, each relative to the descriptor of its directory, and
no link is followed. Invariants: a project that cannot be read completely is refused; the contents
that are sent to the guest match the digests in the tree.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from fumehood.core.errors import InvalidParams
from fumehood.core.escaping import visible
from fumehood.core.workspace_path import path_fault
from fumehood.executors.workspace_guest import (
    DIRECTORY,
    LINK,
    MAX_FILES,
    MAX_TARGET,
    SHOWN_CHARACTERS,
)
from fumehood.projects.rules import FILE_NAME, MAX_RULES_BYTES, IgnoreRules, TooManyRules, is_never
from fumehood.protocol import framing

CHUNK_BYTES = 1 << 20

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PARENT_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a link of a project. Two entries are equal only if their contents are the same."""

    size: int
    """The size of the file in bytes, or `LINK` for a link."""
    can_run: bool
    digest: str
    """The SHA-256 of the file's content, or the target of the link."""

    @property
    def is_link(self) -> bool:
        return self.size == LINK


Tree = Mapping[str, Entry]
"""Path → the file or link there. As in git, a tree contains no directories."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file, a directory or a link that was found in a project. `target` is the target of a
    link.
    """

    path: str
    status: os.stat_result
    target: str = ""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


def refused(path: str, why: str) -> InvalidParams:
    """Return the error for a path that cannot be copied into a session. `why` is a clause."""
    return InvalidParams(
        f"{visible(path)[:SHOWN_CHARACTERS]} {why}. Remove it, or list it in .gitignore.",
        fields=["project"],
    )


class ProjectDirectory:
    """The directory of a project on the host. It is a context manager that opens the directory. Its
    methods block.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._top = -1

    def __enter__(self) -> ProjectDirectory:
        """Open the directory. Raises InvalidParams if it cannot be opened, or if its path contains
        a link.
        """
        try:
            self._top = self._opened()
        except OSError as error:
            shown = visible(str(self.path))
            words = f"The project directory {shown} cannot be opened: {error.strerror}."
            raise InvalidParams(words, fields=["project"]) from None
        self._stack.callback(os.close, self._top)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _opened(self) -> int:
        """Open the directory, and return its descriptor. Raises OSError.

        The directory is opened name by name from the root, so that no link in its path is followed.
        """
        names = self.path.parts
        descriptor = os.open(names[0], PARENT_FLAGS)
        try:
            for name in names[1:]:
                inner = os.open(name, PARENT_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            return os.open(".", DIRECTORY_FLAGS, dir_fd=descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def directory(self, path: str) -> Iterator[int]:
        """Yield a descriptor of the directory `path` in the project. An empty `path` means the
        project's top directory.

        Raises OSError, for example if the path contains a link.
        """
        descriptor = os.dup(self._top)
        try:
            for name in path.split("/") if path else ():
                inner = os.open(name, DIRECTORY_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory that contains `path`, and the last name in `path`.

        Raises OSError, for example if the path of this directory contains a link.
        """
        above, _, name = path.rpartition("/")
        with self.directory(above) as directory:
            yield directory, name

    def take_proof(self, name: str) -> bool:
        """Remove the file `name`, with which a claimant proves write access to the directory.
        Return False if there is no such file, it is not empty, or it does not belong to the
        engine's user.
        """
        try:
            status = os.stat(name, dir_fd=self._top, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size or status.st_uid != os.geteuid():
                return False
            os.unlink(name, dir_fd=self._top)
        except OSError:
            return False
        return True

    # -- reading ---------------------------------------------------------------------------

    def look(self, *, everything: bool) -> tuple[list[Found], dict[str, str]]:
        """List the project. Return all files, directories and links, and the texts of the
        `.gitignore` files. In the list, each path comes after its directory. The texts are a
        mapping from directory to text.

        Paths that the `.gitignore` rules leave out, and paths that no project can contain, are not
        returned. If `everything` is True, `.gitignore` files are ignored.

        Raises:
            InvalidParams: there are too many files or rules, or a path cannot be copied.
        """
        found: list[Found] = []
        texts: dict[str, str] = {}
        try:
            self._look_at(self._top, "", found, texts, None if everything else IgnoreRules())
        except TooManyRules as error:
            words = f"The project cannot be read: {error}."
            raise InvalidParams(words, fields=["project"]) from None
        return found, texts

    def _look_at(
        self,
        directory: int,
        path: str,
        found: list[Found],
        texts: dict[str, str],
        rules: IgnoreRules | None,
    ) -> None:
        if path.count("/") >= framing.MAX_DIRECTORY_DEPTH:
            raise refused(path, "is nested too deeply")
        names = sorted(os.listdir(directory))
        if rules is not None and FILE_NAME in names:
            text = _rules_text(directory)
            if text is not None:
                texts[path] = text
                rules.add(path, text)
        below: list[Found] = []
        for name in names:
            one = self._found(directory, name, f"{path}/{name}" if path else name)
            if is_never(name) or (
                rules is not None and rules.leave_out(one.path, is_directory=one.is_directory)
            ):
                continue
            _require_plain(one)
            found.append(one)
            if len(found) > MAX_FILES:
                raise InvalidParams(
                    f"The project has more than {MAX_FILES:,} files and directories. Leave out "
                    "what it does not need, by .gitignore.",
                    fields=["project"],
                )
            if one.is_directory:
                below.append(one)
        for one in below:
            try:
                inner = os.open(one.path.rpartition("/")[2], DIRECTORY_FLAGS, dir_fd=directory)
            except OSError as error:
                raise refused(one.path, f"cannot be read ({error.strerror})") from None
            try:
                self._look_at(inner, one.path, found, texts, rules)
            finally:
                os.close(inner)

    @staticmethod
    def _found(directory: int, name: str, path: str) -> Found:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            is_link = stat.S_ISLNK(status.st_mode)
            return Found(path, status, os.readlink(name, dir_fd=directory) if is_link else "")
        except OSError:
            raise changed(path) from None

    def fed(self, found: Sequence[Found], tree: dict[str, Entry]) -> Iterator[bytes]:
        """Yield the bytes in which the project is sent to the guest: for each path in `found`, a
        description and, if it is a file, its content. Meanwhile, add an entry for each file and
        link to `tree`.

        Raises:
            InvalidParams: a file cannot be read, or was changed after `look`.
        """
        piece = bytearray()
        for one in found:
            piece += _row(one)
            if stat.S_ISREG(one.status.st_mode):
                digest = hashlib.sha256()
                for chunk in self._read(one):
                    digest.update(chunk)
                    piece += chunk
                    if len(piece) >= CHUNK_BYTES:
                        yield bytes(piece)
                        piece.clear()
                tree[one.path] = Entry(one.status.st_size, _can_run(one.status), digest.hexdigest())
            elif not one.is_directory:
                tree[one.path] = Entry(LINK, False, one.target)
        piece += framing.encode({"row": None})
        yield bytes(piece)

    def _read(self, one: Found) -> Iterator[bytes]:
        """Yield the content of a file in pieces.

        Raises InvalidParams if the file cannot be read, or was changed after `look`.
        """
        left = one.status.st_size
        try:
            with self.parent(one.path) as (directory, name):
                file = _open_plain(name, directory)
            with file:
                while chunk := file.read(min(left + 1, CHUNK_BYTES)):
                    left -= len(chunk)
                    if left < 0:
                        break
                    yield chunk
                status = os.fstat(file.fileno())
        except PermissionError:
            raise refused(one.path, "cannot be read") from None
        except OSError:
            raise changed(one.path) from None
        if left or _moment(status) != _moment(one.status):
            raise changed(one.path)

    def entry(self, path: str) -> tuple[Entry | None, bool]:
        """Return the entry of the file or link that is now at `path`, and whether anything exists
        there. The entry is None if there is neither a file nor a link.
        """
        try:
            with self.parent(path) as (directory, name):
                return entry_of(name, directory), True
        except OSError:
            return None, self.has(path)

    def has(self, path: str) -> bool:
        """Whether anything exists at `path`."""
        try:
            with self.parent(path) as (directory, name):
                os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return False
        return True

    def content(self, path: str, most: int) -> bytes | None:
        """Return the content of the file `path`, or None if it is larger than `most` bytes or
        cannot be read.
        """
        try:
            with self.parent(path) as (directory, name):
                file = _open_plain(name, directory)
            with file:
                if os.fstat(file.fileno()).st_size > most:
                    return None
                return file.read(most + 1)
        except OSError:
            return None


def _open_plain(name: str, directory: int) -> FileIO:
    """Open the regular file `name` for reading. `directory` is the descriptor of its directory.

    Raises OSError, for example if `name` is not a regular file.
    """
    descriptor = os.open(name, FILE_FLAGS, dir_fd=directory)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return FileIO(descriptor)
        raise OSError(errno.EINVAL, "It is no plain file")
    except BaseException:
        os.close(descriptor)  # `FileIO` does not close a descriptor that it refuses
        raise


def entry_of(name: str, directory: int) -> Entry | None:
    """Return the entry of the file or link `name`, or None if it is something else. `directory` is
    the descriptor of its directory.

    Raises OSError, for example if `name` does not exist.
    """
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return Entry(LINK, False, os.readlink(name, dir_fd=directory))
    if not stat.S_ISREG(status.st_mode):
        return None
    digest = hashlib.sha256()
    size = 0
    with _open_plain(name, directory) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Entry(size, _can_run(status), digest.hexdigest())


def link_fault(path: str, target: str) -> str | None:
    """Return None if a link from `path` to `target` is allowed in a project. Otherwise return a
    clause that says why not, for example because it leads out of the project.
    """
    if not target.isprintable() or len(target) > MAX_TARGET:
        return "is a link whose target cannot be shown"
    if not target or target.startswith("/"):
        return "is a link that has an absolute target"
    steps = target.split("/")
    ups = 0
    while ups < len(steps) and steps[ups] in ("..", "."):
        ups += 1
    if steps[:ups].count("..") > path.count("/"):
        return "is a link that leaves the project"
    if ".." in steps[ups:]:  # if a link comes before `..`, this could lead anywhere
        return "is a link with '..' behind a name"
    if is_never("/".join(steps[ups:])):
        return "is a link into .git, or to files of the engine"
    return None


def changed(path: str) -> InvalidParams:
    """Return the error for a file that changed while the project was read."""
    return InvalidParams(
        f"{visible(path)[:SHOWN_CHARACTERS]} changed while the project was read. Try again.",
        fields=["project"],
    )


def _require_plain(one: Found) -> None:
    """Raise InvalidParams if this file, directory or link cannot be copied into a session."""
    fault = path_fault(one.path)
    if fault is not None:
        raise refused(one.path, f"has a name that cannot be used: it {fault}")
    mode = one.status.st_mode
    if stat.S_ISLNK(mode):
        fault = link_fault(one.path, one.target)
        if fault is not None:
            raise refused(one.path, fault)
    elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise refused(one.path, "is neither a file, nor a directory, nor a link")


def _rules_text(directory: int) -> str | None:
    """Return the text of the `.gitignore` file in a directory. `directory` is the descriptor of the
    directory. Return None if there is no such regular file, or if it cannot be read.

    Raises:
        TooManyRules: the file is too large.
    """
    try:
        with _open_plain(FILE_NAME, directory) as file:
            content = file.read(MAX_RULES_BYTES + 1)
    except OSError:
        return None
    if len(content) > MAX_RULES_BYTES:
        raise TooManyRules
    return content.decode("utf-8", "replace")


def _row(one: Found) -> bytes:
    status = one.status
    size, can_run = (status.st_size, _can_run(status)) if not one.target else (LINK, False)
    if one.is_directory:
        size, can_run = DIRECTORY, True
    row = [one.path, size, can_run, max(0, status.st_mtime_ns // 1000), one.target]
    return framing.encode({"row": row})


def _can_run(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IXUSR)


def _moment(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns
