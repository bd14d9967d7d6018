"""The projects of sessions: claim a directory of the host, copy it into a session, and write the
session's changes back.

Host side, above the sessions. A program that embeds the engine can name any directory of the host.
Every other caller must create a file in the directory, as the engine's user. This proves that the
caller itself can write there. Invariant: only `SessionProject.apply` writes to a project. It writes
only the changes that were shown and approved, and only into the directory from which the session's
files were copied.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.errors import (
    EngineError,
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
    StateUnavailable,
    WorkspaceChanged,
)
from fumehood.core.escaping import visible
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits, remember
from fumehood.core.names import MAX_NAMED
from fumehood.core.names import listed as listed_names
from fumehood.core.session import Project, SessionRecord
from fumehood.executors.effects import Effect
from fumehood.executors.workspace_guest import (
    MAX_LISTED,
    SHOWN_CHARACTERS,
    NotRead,
    Said,
    Unpacked,
    ask,
    not_as_agreed,
    scan,
)
from fumehood.projects.changes import (
    SHOWN_BYTES,
    Baseline,
    Changes,
    changes_of,
    digest_of,
    listed,
    patch_of,
    shown,
    stage,
)
from fumehood.projects.home import NAME, ProjectHome
from fumehood.projects.rules import (
    FILE_NAME,
    GIT_NAMES,
    PROOF_PREFIX,
    IgnoreRules,
    TooManyRules,
    git_directories,
    plain,
)
from fumehood.projects.tree import Entry, Found, ProjectDirectory
from fumehood.projects.writing import (
    ANOTHER,
    IN_THE_WAY,
    Change,
    Conflicts,
    Journals,
    Writing,
    as_told,
)
from fumehood.protocol.connections import ONLY, TAKEN, Segment
from fumehood.protocol.framing import FrameError
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.session import workspace_mb
from fumehood.sandbox.session_use import SessionLease
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.streams import Stream, StreamKind, StreamPort
from fumehood.sandbox.wall import Lease, RunSinks, try_later
from fumehood.storage.files import Missing, SavedFiles, file_name

MAX_KNOWN = 50
"""Maximum number of sessions whose baselines are kept in memory. Other baselines are read from
storage when they are needed.
"""

FEED_S = 300.0
"""Maximum seconds for copying a project into a session."""

SETTLED_S = 0.05
"""Seconds after the last write to a file. Only then does the guest report a version of the file."""

APPLIED = "is not as it was last applied"
CHANGED = "The project has changed since the diff was shown. Nothing was written."
REPOSITORY = "would be part of a git repository"


class Claim(NamedTuple):
    """A claim of a directory of the host. New sessions can be made with copies of the directory.
    `everything` says whether files that `.gitignore` files exclude are also copied.
    """

    directory: Path
    everything: bool
    proof: str = ""
    """The name of the file that the claimant must create in the directory. Empty once the file was
    found.
    """


class Judged(NamedTuple):
    """The result of comparing a session's changes with the files on the host: the changes, the
    conflicts, and the old contents of changed files.
    """

    changes: Sequence[Change]
    conflicts: dict[str, str]
    """Path → a clause that says why the change cannot be written there."""
    old: dict[str, bytes]
    """Path → the content of the host's file before the change. It contains only files that can be
    shown, and that are unchanged since they were copied or last written.
    """


Keep = Callable[[ProjectHome], Awaitable[None]]
"""Stores a changed `ProjectHome` in the record of its session."""


class ProjectStore:
    """The baselines of an engine's sessions, and the engine's journals.

    A baseline is the state of a project when it was copied into the session. A journal records
    changes to a project, so that they can be undone if the engine is killed. `saved` stores the
    baselines on disk, or is None if the engine has no persistent state.
    """

    def __init__(self, saved: SavedFiles | None, journals: Journals) -> None:
        self.saved = saved
        self.journals = journals
        self._known: OrderedDict[str, Baseline] = OrderedDict()
        self.turn = anyio.Lock()
        """A writer must hold this lock, whichever project it writes."""
        self.comparing = anyio.CapacityLimiter(1)
        """Limits how many threads evaluate the `.gitignore` rules of sessions at the same time."""

    async def baseline(self, session_id: str, home: ProjectHome) -> Baseline:
        """Return the baseline of a session. `home` says where it is stored. Raises StateUnavailable
        if it cannot be read.
        """
        known = self._known.get(session_id)
        if known is None:
            try:
                if self.saved is None or not home.manifest:
                    raise Missing
                got = await self.saved.get({home.manifest: home.manifest_bytes})
            except Missing:
                raise StateUnavailable(
                    "What was copied into this session is not known any more. Make a new one.",
                    retryable=False,
                ) from None
            except OSError:
                raise StateUnavailable("The engine's files cannot be read now.") from None
            known = Baseline.parse(got[home.manifest])
        self.remember(session_id, known)
        return known

    def remember(self, session_id: str, baseline: Baseline) -> None:
        self._known[session_id] = baseline
        self._known.move_to_end(session_id)
        if len(self._known) > MAX_KNOWN and self.saved is not None:
            self._known.popitem(last=False)

    async def put(self, session_id: str, directory: Path, baseline: Baseline) -> ProjectHome:
        """Store the baseline of a session, and return the `ProjectHome` that says where it is
        stored. `directory` is the project directory on the host.

        If the engine has persistent state, the baseline is on disk when this method returns.

        Raises:
            StateUnavailable: the baseline cannot be written.
        """
        self.remember(session_id, baseline)
        if self.saved is None:
            return ProjectHome(str(directory))
        content = baseline.content()
        name = file_name(session_id, content)
        try:
            await self.saved.put({name: content})
        except OSError as error:
            words = f"The project cannot be noted: {error.strerror or 'no files'}."
            raise StateUnavailable(words) from None
        return ProjectHome(str(directory), name, len(content))

    async def copied(self, session_id: str, home: ProjectHome, made: str) -> ProjectHome:
        """Copy the baseline of the session `session_id` to the session `made`, and return the
        `ProjectHome` of `made`. `home` is the `ProjectHome` of the session `session_id`.

        Raises:
            StateUnavailable: the baseline cannot be read or written.
        """
        baseline = replace(await self.baseline(session_id, home), versions={})
        return await self.put(made, Path(home.directory), baseline)


@dataclass(slots=True)
class SessionProject:
    """The project of one session. A caller of its methods must hold the session's lease."""

    _store: ProjectStore
    _session_id: str
    _home: ProjectHome
    _keep: Keep

    async def difference(self, lease: Lease) -> JsonObject:
        """Return the changes in the session's project as JSON. The fields are `diff` (a patch),
        `files` (a list of the changed files), `truncated` (whether the patch omits changes) and
        `unseen` (paths that are never written to the host).
        """
        found, judged = await self._compare(lease)
        diff, is_cut = await anyio.to_thread.run_sync(
            patch_of, judged.changes, judged.conflicts, judged.old, found.texts
        )
        files = listed(judged.changes)
        for item in files:
            if item["path"] in judged.conflicts:
                item["conflict"] = judged.conflicts[item["path"]]
        return {
            "diff": diff, "files": files, "truncated": is_cut, "unseen": list(found.unseen)
        }  # fmt: skip

    async def effect(self, lease: Lease) -> Effect:
        """Return the changes that `apply` would write, as approvers see them. If `apply` would
        fail, the effect contains the error.
        """
        found, judged = await self._compare(lease)
        error: EngineError | None = _conflict(judged.conflicts) if judged.conflicts else None
        if error is None and len(judged.changes) > MAX_LISTED:
            error = InvalidParams(
                f"{len(judged.changes):,} files have changed, and an approver can be shown "
                f"{MAX_LISTED:,}. Undo changes that are not needed, and apply the rest in parts."
            )
        if error is None and not judged.changes:
            error = InvalidParams("Nothing has changed in the session's project.")
        told = await anyio.to_thread.run_sync(
            shown, judged.changes, judged.conflicts, judged.old, found.texts, self._home.directory
        )
        if error is not None:
            told["would_fail"] = error.message
        return Effect(told, digest_of(judged.changes), digest_of(judged.changes), error)

    async def apply(self, lease: Lease, expected: str | None, call_id: str) -> JsonObject:
        """Write the session's changes into the project directory on the host. Return the
        directory's name and the changed files as JSON.

        If `expected` is given, the digest of the changes must equal it. `call_id` is the id of the
        call. If the engine is killed while it writes, the next engine reports the outcome under
        this id.

        Raises:
            WorkspaceChanged: the digest of the changes is not `expected`, or a file has changed
                meanwhile. Nothing was written.
            InvalidParams: the changes cannot be read, or conflict with files on the host. Nothing
                was written.
            StateUnavailable: the baseline cannot be read, or the changes cannot be written. Nothing
                was written.
            EngineError: the guest failed. Nothing was written.
            OutcomeUnknown: writing failed, and the changes that were already made could not all be
                undone.
        """
        store = self._store
        baseline = await store.baseline(self._session_id, self._home)
        found = await self._changes(lease, baseline)
        async with store.turn:
            with ExitStack() as stack:
                project, writing = await anyio.to_thread.run_sync(self._open, stack, call_id)
                try:
                    judged = await anyio.to_thread.run_sync(_judge, project, found, baseline)
                    if judged.conflicts:
                        raise _conflict(judged.conflicts)
                    # The check is made before staging, because until then the session's programs
                    # can choose the size.
                    if expected is not None and digest_of(judged.changes) != expected:
                        raise WorkspaceChanged(CHANGED)
                    staging = _Staging(writing)
                    try:
                        await stage(lease, found, judged.changes, staging.write)
                    except NotRead:
                        raise WorkspaceChanged(CHANGED) from None
                    await staging.end()
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(
                            writing.write, judged.changes, found.directories
                        )
                        await self._take_as_baseline(baseline, found.changes)
                except Conflicts as conflicts:
                    raise _conflict(_with_base(conflicts.paths, baseline)) from None
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(stack.close)
        return {"directory": Path(self._home.directory).name, "files": listed(judged.changes)}

    def _open(self, stack: ExitStack, call_id: str) -> tuple[ProjectDirectory, Writing]:
        project = stack.enter_context(ProjectDirectory(Path(self._home.directory)))
        return project, stack.enter_context(Writing(project, self._store.journals, call_id))

    async def _take_as_baseline(self, baseline: Baseline, changes: Sequence[Change]) -> None:
        tree = dict(baseline.tree)
        for change in changes:
            tree.pop(change.path, None)
            if change.after is not None:
                tree[change.path] = change.after
        changed = {one.path for one in changes}
        rules = {  # without those of changed files, which are read again
            directory: text
            for directory, text in baseline.rules.items()
            if (f"{directory}/{FILE_NAME}" if directory else FILE_NAME) not in changed
        }
        applied = baseline.applied | changed
        new = Baseline(tree, rules, baseline.everything, baseline.versions, applied)
        with suppress(EngineError):  # then `_judge` drops the applied changes the next time
            self._home = await self._store.put(self._session_id, Path(self._home.directory), new)
            await self._keep(self._home)

    async def _compare(self, lease: Lease) -> tuple[Changes, Judged]:
        baseline = await self._store.baseline(self._session_id, self._home)
        found = await self._changes(lease, baseline)

        def judge() -> Judged:
            with ProjectDirectory(Path(self._home.directory)) as project:
                return _judge(project, found, baseline)

        return found, await anyio.to_thread.run_sync(judge)

    async def _changes(self, lease: Lease, baseline: Baseline) -> Changes:
        try:
            return await changes_of(lease, baseline, self._store.comparing)
        except NotRead as error:
            raise InvalidParams(f"The project cannot be compared: {error}.") from None


def project_of(lease: Lease) -> SessionProject:
    """Return the project of the leased session. Raises InvalidParams if it has none."""
    project = lease.part(SessionProject) if isinstance(lease, SessionLease) else None
    if project is None:
        raise InvalidParams(
            "This session was not made from a project directory.", fields=["options.session_id"]
        )
    return project


def _judge(project: ProjectDirectory, found: Changes, baseline: Baseline) -> Judged:
    """Compare the changes of a session with the files on the host. Leave out those changes that the
    host's files already contain.
    """
    changes = found.changes
    repositories = _repositories(project, found)
    left_out = _left_out(baseline)
    kept: list[Change] = []
    conflicts: dict[str, str] = {}
    old: dict[str, bytes] = {}
    room = SHOWN_BYTES
    deleted = {one.path for one in changes if one.after is None}
    for change in changes:
        now, is_there = project.entry(change.path)
        # The host may have a file that the rules left out of the copy. If a change with the same
        # content were dropped, a session could find out by guessing what that file contains.
        is_hidden = change.before is None and is_there and left_out(change.path)
        if now == change.after and (now is not None or not is_there) and not is_hidden:
            continue
        kept.append(change)
        if change.after is not None and plain(change.path).startswith(repositories):
            conflicts[change.path] = REPOSITORY
            continue
        below = f"{change.path}/"
        is_emptied = change.before is None and any(path.startswith(below) for path in deleted)
        if now != change.before:
            conflicts[change.path] = ANOTHER if change.before is not None else IN_THE_WAY
        elif now is None and is_there and not is_emptied:
            conflicts[change.path] = IN_THE_WAY
        if change.before is not None and not change.before.is_link:
            content = project.content(change.path, min(room, MAX_READ_BYTES))
            # The content is shown only if it was in the session before, so no session can read
            # later changes on the host.
            if content is not None and hashlib.sha256(content).hexdigest() == change.before.digest:
                room -= len(content)
                old[change.path] = content
    return Judged(kept, _with_base(conflicts, baseline), old)


def _repositories(project: ProjectDirectory, found: Changes) -> tuple[str, ...]:
    """Return the directories on the host that git would treat as repositories if the session's
    files were written there. Such directories matter, because git executes programs that the file
    `config` of a repository names.
    """
    above = {""} | {
        change.path[: at + 1]
        for change in found.changes
        if change.after is not None
        for at, character in enumerate(change.path)
        if character == "/"
    }
    names: set[str] = set(found.present | found.directories)
    for top in above:
        names.update(f"{top}{name}" for name in GIT_NAMES if project.has(f"{top}{name}"))
    return git_directories(names)


def _left_out(baseline: Baseline) -> Callable[[str], bool]:
    """Return a function that says whether the `.gitignore` rules of the copied project leave a path
    out.
    """
    rules = IgnoreRules()
    for directory, text in baseline.rules.items():
        rules.add(directory, text)

    def left_out(path: str) -> bool:
        try:
            return not baseline.everything and rules.leave_out(path, is_directory=False)
        except TooManyRules as error:
            raise InvalidParams(f"The project cannot be compared: {error}.") from None

    return left_out


def _with_base(conflicts: dict[str, str], baseline: Baseline) -> dict[str, str]:
    """Replace the reason `ANOTHER` by `APPLIED` for paths to which changes were already written.

    `conflicts` maps paths to reasons, and so does the result. `ANOTHER` says that the host's file
    differs from the copied file. `APPLIED` says that it differs from the file that was last
    written.
    """
    return {
        path: APPLIED if why == ANOTHER and path in baseline.applied else why
        for path, why in conflicts.items()
    }


def _conflict(paths: dict[str, str]) -> InvalidParams:
    named = [f"{visible(path)[:SHOWN_CHARACTERS]} {why}" for path, why in paths.items()]
    cure = ""
    if set(paths.values()) != {REPOSITORY}:
        cure = (
            " Put the host's file back as it was, or merge both and write the result to both sides."
        )
    return InvalidParams(
        f"Nothing was written to the project: {listed_names(named)}.{cure}",
        details={"conflicts": dict(list(paths.items())[:MAX_NAMED])},
    )


class _Staging:
    """Writes the contents of files into the staging directory. The contents arrive in pieces."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._path: str | None = None
        self._held = ExitStack()
        self._file: Any = None

    async def write(self, path: str, piece: bytes) -> None:
        await anyio.to_thread.run_sync(self._write, path, piece)

    def _write(self, path: str, piece: bytes) -> None:
        if path != self._path:
            self._held.close()
            self._file = self._held.enter_context(self._writing.add(path))
            self._path = path
        with as_told():
            self._file.write(piece)

    async def end(self) -> None:
        await anyio.to_thread.run_sync(self._held.close)


class Projects:
    """Claims directories of the host, and makes sessions with copies of them."""

    def __init__(self, store: ProjectStore, sessions: SessionKeeper) -> None:
        self._store = store
        self._sessions = sessions
        self._claims: OrderedDict[str, Claim] = OrderedDict()

    def claim(self, directory: str, *, everything: bool = False, proven: bool = False) -> Project:
        """Claim a directory of the host, so that sessions can be made from it.

        If `everything` is True, files that `.gitignore` files exclude are copied too. If `proven`
        is False, the claimant must prove that it can write to the directory. To prove it, the
        claimant creates an empty file there before the first session is made. The name of this file
        is the field `proof` of the result.

        Raises:
            InvalidParams: the path is not absolute, or `proven` is True and the path cannot be
                resolved.
        """
        path = Path(directory)
        if not path.is_absolute():
            raise InvalidParams("Give the absolute path of a directory.", fields=["directory"])
        if proven:
            path = _resolved(path)
        claim_id = f"proj_{secrets.token_hex(16)}"
        proof = "" if proven else f"{PROOF_PREFIX}{secrets.token_hex(16)}"
        remember(self._claims, claim_id, Claim(path, everything, proof))
        return Project(id=claim_id, directory=directory, proof=proof)

    async def create(
        self, principal: Principal, *, project: str | None = None, **wishes: Any
    ) -> SessionRecord:
        """Create a session. If `project` is given, copy a claimed directory into it. `project` is
        the id of the claim. `wishes` are the arguments of `SessionKeeper.create`.

        Raises:
            ResourceNotFound: there is no such claim.
            PermissionDenied: the directory does not contain the file that proves the claim.
            InvalidParams: the directory is too large, or a file in it cannot be copied.
            EngineError: the session could not be created, as by `SessionKeeper.create`.
        """
        if project is None:
            return await self._sessions.create(principal, **wishes)
        claim = self._claims.get(project)
        if claim is None:
            words = "There is no such project. Claim its directory first."
            raise ResourceNotFound(words, fields=["project"])
        directory, found, rules = await anyio.to_thread.run_sync(_look, claim)
        self._claims[project] = claim = Claim(directory, claim.everything)
        record = await self._sessions.create(principal, **wishes)
        try:
            home = await self._bring_in(principal, record, claim, found, rules)
            return await self._sessions.keep(record.id, NAME, home.value)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await self._sessions.end(principal, record.id, "its project was not brought in")
            raise

    async def _bring_in(
        self,
        principal: Principal,
        record: SessionRecord,
        claim: Claim,
        found: Sequence[Found],
        rules: dict[str, str],
    ) -> ProjectHome:
        most = workspace_mb(record.memory_mb, record.disk_mb) * MB
        size = sum(one.status.st_size for one in found if not one.is_directory)
        if size > most:
            raise InvalidParams(
                f"The project has {size // MB + 1} MB, and the session's workspace {most // MB}. "
                f"Give the session a larger disk (--disk {max(1024, 2 * (size // MB + 1))}), or "
                "leave out more by .gitignore.",
                fields=["project", "disk_mb"],
            )
        tree: dict[str, Entry] = {}
        turn = await self._sessions.files(principal, record.id)
        async with turn as lease:
            with ExitStack() as stack:
                project = stack.enter_context(ProjectDirectory(claim.directory))
                taken = await feed(lease, project.fed(found, tree))
            if (taken.files, taken.size) != (
                len(found), sum(max(0, one.size) for one in tree.values())
            ):  # fmt: skip
                raise not_as_agreed()
            baseline = Baseline(tree, rules, claim.everything)
            await anyio.sleep(SETTLED_S)
            try:
                rows, _ = await scan(lease, links=True)
            except NotRead as error:
                raise InvalidParams(f"The project cannot be compared: {error}.") from None
        for path, _, _, version in rows:  # no program has run yet: these are the files above
            if version and path in tree and not tree[path].is_link:
                baseline.versions[path] = (version, tree[path].digest)
        return await self._store.put(record.id, claim.directory, baseline)

    async def difference(self, principal: Principal, session_id: str) -> JsonObject:
        """Return the changes in the project of a session, in the form of
        `SessionProject.difference`. First wait until the calls in the session have ended.

        Raises:
            ResourceNotFound: the principal has no such session.
            InvalidParams: the session has no project, or the project cannot be compared.
            SandboxUnavailable, StateUnavailable: the session or its baseline cannot be read now.
        """
        turn = await self._sessions.files(principal, session_id)
        async with turn as lease:
            return await project_of(lease).difference(lease)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a link to itself; a NUL
        words = f"The project directory {visible(str(path))} cannot be found."
        raise InvalidParams(words, fields=["project"]) from None


def _look(claim: Claim) -> tuple[Path, list[Found], dict[str, str]]:
    # The path is resolved only once. Later, a link at this path could lead to a directory in which
    # the claimant cannot write.
    directory = _resolved(claim.directory) if claim.proof else claim.directory
    with ProjectDirectory(directory) as project:
        if claim.proof and not project.take_proof(claim.proof):
            raise PermissionDenied(
                f"The project directory has no empty file {claim.proof} of yours, which shows that "
                "you can write there."
            )
        return directory, *project.look(everything=claim.everything)


FEED_BYTES = 1 << 20
"""Maximum number of bytes that have been sent to the guest but not yet acknowledged."""

FEED = StreamKind("feed", str(FEED_BYTES))


class Feed(Connections):
    """A connection over which the host sends the bytes of a project into the container. A program
    of the engine reads them there.

    The host writes the bytes to `stream`. While the program does not read, the host must wait. The
    guest may send only acknowledgements.
    """

    def __init__(self, port: StreamPort) -> None:
        super().__init__(port, lambda connection: None)
        self.stream = self._open[ONLY] = Connection(self, ONLY, room=0, window=FEED_BYTES)

    def _on_segment(self, segment: Segment) -> None:
        if (segment.step, segment.number) != (TAKEN, ONLY):
            raise FrameError("a connection that no program can have made")
        super()._on_segment(segment)


async def feed(lease: Lease, pieces: Iterator[bytes]) -> Unpacked:
    """Send a project to the guest. `pieces` reads the project's bytes from disk while they are
    sent. Return the guest's report of what it has received.

    Raises:
        EngineError: the project could not be read, or the guest failed.
    """
    limits = Limits(wall_s=FEED_S, cpu_s=FEED_S, memory_mb=None, output_bytes=MB)
    failed: list[BaseException] = []

    async def send(stream: Connection) -> None:
        try:
            while (piece := await anyio.to_thread.run_sync(next, pieces, None)) is not None:
                await stream.send(piece)
        except anyio.BrokenResourceError:
            pass  # the run has ended: the guest's answer has the reason
        except EngineError as error:
            failed.append(error)
            group.cancel_scope.cancel()

    def opened(port: StreamPort) -> Feed:
        fed = Feed(port)
        group.start_soon(send, fed.stream)
        return fed

    said: list[Said[Unpacked]] = []
    async with anyio.create_task_group() as group:
        sinks = RunSinks(streams=(Stream(FEED, opened),))
        try:
            said.append(await ask(lease, {"do": "take"}, limits, Unpacked, sinks))
        except EngineError as error:
            failed.append(error)
        group.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not said:
        raise try_later("The project could not be copied into the session.")
    return said[0].required
