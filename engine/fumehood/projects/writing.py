"""Writes changes into a project. Either all or none are written, even if the engine is killed in
between.

Host side, in a thread. The steps are:

* The new contents are staged: they are written into a staging directory in the project, which is on
  the same file system.
* A journal in the engine's own state records the changes.
* Each old file is moved into the staging directory and checked there. Then the new file is put in
  its place. This never overwrites a file.

If writing fails, all changes are undone. If the engine is killed before the journal is marked as
done, the next engine undoes them. Until then, an engine that cannot undo them refuses to use the
state. Invariants: no link is followed; if a file on the host is not as it was copied, nothing is
changed; nothing outside the project is changed.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fumehood.core.errors import EngineError, OutcomeUnknown, StateUnavailable
from fumehood.core.workspace_path import MAX_NAME_BYTES
from fumehood.projects.rules import STAGING_PREFIX
from fumehood.projects.tree import Entry, ProjectDirectory, entry_of
from fumehood.storage.directory import private_directory, write_private
from fumehood.storage.errors import StoreError

NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

ANOTHER = "is not as it was copied"
IN_THE_WAY = "is in the way"


@dataclass(frozen=True, slots=True)
class Change:
    """The change at one path. `before` is None if the change creates the path. `after` is None if
    it deletes the path.
    """

    path: str
    before: Entry | None
    after: Entry | None


class Conflicts(Exception):
    """Raised if files on the host have changed meanwhile, so nothing was written. `paths` maps the
    path of each such file to a clause that says what has changed.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        super().__init__()
        self.paths = dict(paths)


@dataclass(slots=True)
class _Step:
    path: str
    number: int
    has_old: bool
    staged: str | None
    """The name of the new file in the staging directory, or None if the step creates a link or only
    deletes.
    """
    inode: int | None
    modified_ns: int | None
    """This and `inode` identify the staged file. If the file at the path later has another
    modification time, another program has changed it.
    """
    target: str | None
    """The target of the new link, or None if the step does not create a link."""


@dataclass(slots=True)
class _Journal:
    directory: str
    staging: str
    call_id: str = ""
    """The id of the call that writes the changes. Empty in a journal of an old engine version."""
    state: str = "staging"
    """`staging`, then `writing`, then `done`. If the engine was killed while `writing`, the next
    engine sets `undone`, or `mixed` if another program has changed the files meanwhile.
    """
    steps: list[_Step] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    """The directories that the changes create."""
    emptied: dict[str, int] = field(default_factory=dict)
    """The directories that are removed if the deletions leave them empty → the mode of each."""

    def text(self) -> bytes:
        steps = [astuple(step) for step in self.steps]
        return json.dumps({**asdict(self), "steps": steps}).encode()

    @classmethod
    def parse(cls, text: bytes) -> _Journal:
        told: dict[str, Any] = json.loads(text)
        steps = [_Step(*row) for row in told.pop("steps")]
        return cls(**told, steps=steps)


class Recovered(NamedTuple):
    """The result of `Journals.recover`, which undoes the unfinished changes of a killed engine."""

    failed: list[str]
    """The project directories whose changes could not be undone, and the journals that cannot be
    read. All their journals are kept for the next attempt.
    """
    outcomes: dict[str, bool]
    """Id of a call → True if all its changes were written, False if none was."""


class Journals:
    """The journals of one engine, which are files in a separate directory. Each journal records a
    set of changes to a project, so that the changes can be undone if the engine is killed.

    The function `need` records whether there are journals. Invariant: while a journal exists, the
    recorded value is True.
    """

    def __init__(
        self, directory: Path | None, need: Callable[[bool], None] = lambda is_needed: None
    ) -> None:
        """Use the journals in a directory.

        Args:
            directory: the directory of the journals. If it is None, no journals are written. The
                changes of a killed engine can then not be undone.
            need: a function that records whether there are journals (True or False). While there
                are journals, only an engine that can undo changes may use the state. It may raise
                StoreError.
        """
        self._directory = directory
        self._need = need
        self._turn = threading.Lock()
        """Held while the number of journals changes, and while `need` records whether there are
        any.
        """
        self._recovered: list[Path] = []

    def recover(self) -> Recovered:
        """Undo the unfinished changes of an engine that was killed, and remove its staging
        directories.

        The caller must store the returned outcomes, and then call `forget`.
        """
        failed, outcomes = found = Recovered([], {})
        if self._directory is None or not self._directory.is_dir():
            return found
        for draft in self._directory.glob("*.json.new"):  # the engine was killed before the rename
            draft.unlink(missing_ok=True)
        for path in sorted(self._directory.glob("*.json")):
            try:
                journal = _Journal.parse(path.read_bytes())
            except (OSError, ValueError, TypeError, KeyError):
                failed.append(str(path))
                continue
            try:
                with ProjectDirectory(Path(journal.directory)) as project:
                    if journal.state == "writing":
                        journal.state = "undone" if _put_back(project, journal) else "mixed"
                        self.write(journal)
                    _remove_staging(project, journal.staging)
            except (OSError, EngineError):
                failed.append(journal.directory)
                continue
            if journal.call_id and journal.state != "mixed":
                outcomes[journal.call_id] = journal.state == "done"
                self._recovered.append(path)
            else:
                path.unlink(missing_ok=True)
        return found

    def forget(self) -> None:
        """Remove the journals whose outcomes `recover` has returned."""
        self._remove(*self._recovered)
        self._recovered.clear()

    def begin(self, journal: _Journal) -> None:
        """Write the first version of a journal to disk. Raises OSError or StoreError."""
        with self._turn:
            if self._directory is not None:
                self._need(True)
            self.write(journal)

    def write(self, journal: _Journal) -> None:
        """Write the current state of a journal to disk, in place of the earlier state. Raises
        OSError.
        """
        if self._directory is None:
            return
        private_directory(self._directory)
        path = self._directory / _file_name(journal)
        write_private(path, journal.text())

    def drop(self, journal: _Journal) -> None:
        """Delete a journal whose changes have all been written or undone."""
        if self._directory is not None:
            self._remove(self._directory / _file_name(journal))

    def _remove(self, *paths: Path) -> None:
        """Delete these journals. Then tell `need` whether any journals are left."""
        with self._turn:
            for path in paths:
                path.unlink(missing_ok=True)
            if self._directory is not None:
                with suppress(StoreError):  # the next start tries again
                    self._need(any(self._directory.glob("*.json")))


def _file_name(journal: _Journal) -> str:
    return f"{journal.staging.removeprefix(STAGING_PREFIX)}.json"


class Writing:
    """Writes one set of changes into a project. If a change cannot be written, the changes already
    made are undone, as far as possible. This is a context manager, and its methods block.

    First call `add` for each new or changed file to store its new content in the staging directory.
    Then call `write` once. `call_id` is the id of the call that writes the changes.
    """

    def __init__(self, project: ProjectDirectory, journals: Journals, call_id: str = "") -> None:
        self._project = project
        self._journals = journals
        staging = f"{STAGING_PREFIX}{secrets.token_hex(8)}"
        self._journal = _Journal(str(project.path), staging, call_id)
        self._staged: dict[str, str] = {}
        self._is_left = False

    def __enter__(self) -> Writing:
        with as_told(), self._project.directory("") as top:
            self._journals.begin(self._journal)
            try:
                os.mkdir(self._journal.staging, 0o700, dir_fd=top)
            except OSError:
                self._journals.drop(self._journal)
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_left:  # the changes could not be undone: the next engine tries again
            return
        with suppress(OSError):
            _remove_staging(self._project, self._journal.staging)
            self._journals.drop(self._journal)

    @contextmanager
    def add(self, path: str) -> Any:
        """Yield an open file in the staging directory, to which the caller writes the new content
        of `path`. Raises StateUnavailable if the content cannot be written.
        """
        name = f"new-{len(self._staged)}"
        self._staged[path] = name
        with (
            as_told(),
            self._project.directory(self._journal.staging) as staging,
            os.fdopen(os.open(name, NEW_FLAGS, 0o600, dir_fd=staging), "wb") as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())

    def write(self, changes: Iterable[Change], directories: frozenset[str]) -> None:
        """Write the changes. `directories` are the directories in the session. They are not removed
        from the project even if they become empty.

        Raises:
            Conflicts: a file on the host differs from the `before` of its change, or another file
                is in the way. Nothing was changed.
            StateUnavailable: the disk is full, or permission is missing. Nothing was changed.
            OutcomeUnknown: writing failed, and the changes that were already made could not all be
                undone.
        """
        journal, project = self._journal, self._project
        with as_told():
            todo = sorted(changes, key=lambda one: (one.after is not None, one.path))
            self._plan(todo, directories)
            journal.state = "writing"
            self._journals.write(journal)
            try:
                for step, change in zip(journal.steps, todo, strict=True):
                    if change.after is None:
                        _do(project, journal, step, change)
                for path in sorted(journal.emptied, reverse=True):
                    with suppress(OSError), project.parent(path) as (directory, name):
                        os.rmdir(name, dir_fd=directory)
                for path in journal.made:
                    _make(project, path)
                for step, change in zip(journal.steps, todo, strict=True):
                    if change.after is not None:
                        _do(project, journal, step, change)
                for path in {change.path.rpartition("/")[0] for change in todo}:
                    with suppress(OSError), project.directory(path) as directory:
                        os.fsync(directory)
                journal.state = "done"
                self._journals.write(journal)
            except BaseException as error:
                self._undo(error)
                raise

    def _undo(self, error: BaseException) -> None:
        """Undo the changes after `error` has interrupted the writing. Raises OutcomeUnknown if not
        all changes could be undone.
        """
        self._is_left = True
        try:
            is_whole = _put_back(self._project, self._journal)
        except OSError as fault:
            raise OutcomeUnknown(
                "The project could not be written, and not everything could be undone: "
                f"{fault.strerror}. The engine tries again when it starts. Look at the project."
            ) from error
        self._is_left = False
        if not is_whole:
            raise OutcomeUnknown(
                "The project could not be written, and somebody else changed it meanwhile, so that "
                "not everything could be undone. Former contents are in files named *.before-*. "
                "Look at the project."
            ) from error

    def _plan(self, todo: list[Change], directories: frozenset[str]) -> None:
        """Add one step for each change in `todo` to the journal, and set the mode of each staged
        file. `directories` are the directories in the session, which are not removed if they become
        empty.
        """
        journal, project = self._journal, self._project
        lacking: set[str] = set()
        emptied: set[str] = set()
        for number, change in enumerate(todo):
            staged, inode, modified_ns, target = None, None, None, None
            above = _above(change.path)
            if change.after is not None:
                lacking.update(above)
                if change.after.is_link:
                    target = change.after.digest
                else:
                    staged = self._staged[change.path]
                    inode, modified_ns = self._set_mode(change, staged)
            elif change.before is not None:
                emptied.update(one for one in above if one not in directories)
            has_old = change.before is not None
            journal.steps.append(
                _Step(change.path, number, has_old, staged, inode, modified_ns, target)
            )
        for path in sorted(lacking):
            with suppress(OSError), project.parent(path) as (directory, name):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and path not in emptied:
                    continue
            journal.made.append(path)
        for path in emptied:
            with suppress(OSError), project.parent(path) as (directory, name):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    journal.emptied[path] = stat.S_IMODE(status.st_mode)

    def _set_mode(self, change: Change, staged: str) -> tuple[int, int]:
        """Set the mode of the staged file. Return its inode, and its modification time in
        nanoseconds.

        The mode is that of the file which the staged file replaces. If there is none, it is 0644.
        The permission to execute is that of `change.after` in both cases.
        """
        assert change.after is not None
        mode = 0o644
        with suppress(OSError), self._project.parent(change.path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                mode = stat.S_IMODE(status.st_mode) & 0o777
        readers = mode >> 2 & 0o111
        mode = mode | readers if change.after.can_run else mode & ~0o111
        with self._project.directory(self._journal.staging) as staging:
            descriptor = os.open(staged, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=staging)
            try:
                os.fchmod(descriptor, mode)
                status = os.fstat(descriptor)
                return status.st_ino, status.st_mtime_ns
            finally:
                os.close(descriptor)


def _do(project: ProjectDirectory, journal: _Journal, step: _Step, change: Change) -> None:
    """Carry out one step. First move the old file, if there is one, into the staging directory, and
    check it. Then put the new file or link in its place.

    Raises:
        Conflicts: the old file or link differs from `change.before`, or another file is at the
            path.
        OSError: the file system failed in another way.
    """
    old = f"old-{step.number}"
    with (
        _conflicts(step.path),
        project.parent(step.path) as (directory, name),
        project.directory(journal.staging) as staging,
    ):
        if step.has_old:
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise Conflicts({step.path: ANOTHER})
            os.rename(name, old, src_dir_fd=directory, dst_dir_fd=staging)
            if entry_of(old, staging) != change.before:
                raise Conflicts({step.path: ANOTHER})
        if step.target is not None:
            os.symlink(step.target, name, dir_fd=directory)
        elif step.staged is not None:
            os.link(
                step.staged, name, src_dir_fd=staging, dst_dir_fd=directory, follow_symlinks=False
            )


def _make(project: ProjectDirectory, path: str) -> None:
    with _conflicts(path), project.parent(path) as (directory, name):
        os.mkdir(name, 0o755, dir_fd=directory)


@contextmanager
def _conflicts(path: str) -> Iterator[None]:
    """Raise Conflicts if the `with` block raises an OSError that shows that another program has
    changed `path`. Other errors are not converted.
    """
    try:
        yield
    except FileExistsError:
        raise Conflicts({path: IN_THE_WAY}) from None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR):
            raise Conflicts({path: ANOTHER}) from None
        raise


def _put_back(project: ProjectDirectory, journal: _Journal) -> bool:
    """Undo those steps of a journal that were carried out. Return True if all files are as before,
    and False if another program wrote to a path meanwhile.

    If another file is now at the path of an old file, the old file is stored beside it under a new
    name. If the directory cannot be opened, the old file is stored in the project's top directory.

    If this function was interrupted, it can be called again. Raises OSError if the file system
    fails.
    """
    is_whole = True
    with project.directory(journal.staging) as staging:
        for step in reversed(journal.steps):
            is_gone = _take_away(project, step)
            is_whole = is_whole and (is_gone or step.has_old or step.path in journal.emptied)
        for path in reversed(journal.made):
            with suppress(OSError), project.parent(path) as (directory, name):
                os.rmdir(name, dir_fd=directory)
        for path, mode in sorted(journal.emptied.items()):
            with suppress(OSError), project.parent(path) as (directory, name):
                os.mkdir(name, mode, dir_fd=directory)
        for step in journal.steps:
            old = f"old-{step.number}"
            if not step.has_old:
                continue
            name = step.path.rpartition("/")[2]
            mark = f".before-{journal.staging.removeprefix(STAGING_PREFIX)}"
            short = name.encode()[: MAX_NAME_BYTES - len(mark)].decode(errors="ignore")
            aside = f"{short}{mark}"
            with _parent_or_top(project, step.path) as (directory, is_top):
                if _is_there(old, staging):
                    # Another program may have written to the path meanwhile.
                    is_taken = is_top or _is_there(name, directory)
                    place = aside if is_taken else name
                    os.rename(old, place, src_dir_fd=staging, dst_dir_fd=directory)
                is_whole = is_whole and not _is_there(aside, directory)
    return is_whole


@contextmanager
def _parent_or_top(project: ProjectDirectory, path: str) -> Iterator[tuple[int, bool]]:
    """Yield a descriptor of the directory that contains `path`, and False. If this directory cannot
    be opened, yield a descriptor of the project's top directory, and True.
    """
    with ExitStack() as stack:
        try:
            directory, is_top = stack.enter_context(project.parent(path))[0], False
        except OSError:
            directory, is_top = stack.enter_context(project.directory("")), True
        yield directory, is_top


def _take_away(project: ProjectDirectory, step: _Step) -> bool:
    """Remove the file or link that a step has created. If another program has changed it, leave it
    there.

    Return True if nothing is left at the path.
    """
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        project.parent(step.path) as (
            directory,
            name,
        ),
    ):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        here = (status.st_ino, status.st_mtime_ns)
        is_ours = here == (step.inode, step.modified_ns) and stat.S_ISREG(status.st_mode)
        if step.target is not None and stat.S_ISLNK(status.st_mode):
            is_ours = os.readlink(name, dir_fd=directory) == step.target
        if is_ours:
            os.unlink(name, dir_fd=directory)
        return is_ours
    return True


def _is_there(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove_staging(project: ProjectDirectory, staging: str) -> None:
    with suppress(FileNotFoundError), project.directory(staging) as inner:
        for name in os.listdir(inner):  # noqa: PTH208 - a descriptor
            os.unlink(name, dir_fd=inner)
    with suppress(FileNotFoundError), project.directory("") as top:
        os.rmdir(staging, dir_fd=top)


def _above(path: str) -> list[str]:
    """Return the directories above `path`, topmost first."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


@contextmanager
def as_told() -> Iterator[None]:
    """Convert errors inside the `with` block: raise StateUnavailable instead of OSError."""
    try:
        yield
    except OSError as error:
        raise StateUnavailable(
            f"The project could not be written, and is as it was: {error.strerror}."
        ) from None
