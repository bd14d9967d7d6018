"""Changes are written into a project completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import InvalidParams, OutcomeUnknown, StateUnavailable
from fumehood.executors.workspace_guest import LINK
from fumehood.projects import writing
from fumehood.projects.changes import patch_of
from fumehood.projects.rules import STAGING_PREFIX
from fumehood.projects.tree import Entry, ProjectDirectory
from fumehood.projects.writing import Change, Conflicts, Journals, Writing, _Journal
from fumehood.storage.errors import WriteFailed

File = tuple[bytes, bool] | str
"""Content and whether it can be executed, or a link's target."""

Files = dict[str, File]


def entry(file: File | None) -> Entry | None:
    if file is None:
        return None
    if isinstance(file, str):
        return Entry(LINK, False, file)
    return Entry(len(file[0]), file[1], hashlib.sha256(file[0]).hexdigest())


def build(top: Path, files: Files) -> None:
    top.mkdir(exist_ok=True)
    for path, file in files.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(file, str):
            (top / path).symlink_to(file)
        else:
            (top / path).write_bytes(file[0])
            (top / path).chmod(0o755 if file[1] else 0o644)


def found(top: Path) -> Files:
    files: Files = {}
    for directory, names, others in os.walk(top):
        names[:] = [name for name in names if name != ".git"]
        for name in [*others, *(one for one in names if (Path(directory) / one).is_symlink())]:
            path = Path(directory) / name
            if path.is_symlink():
                files[str(path.relative_to(top))] = os.readlink(path)
            else:
                files[str(path.relative_to(top))] = (
                    path.read_bytes(), bool(path.stat().st_mode & 0o100)
                )  # fmt: skip
    return files


def changes(before: Files, after: Files) -> list[Change]:
    return [
        Change(path, entry(before.get(path)), entry(after.get(path)))
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]


def directories(files: Files) -> frozenset[str]:
    return frozenset(str(above) for path in files for above in Path(path).parents)


def apply(top: Path, journals: Journals, before: Files, after: Files) -> None:
    with ProjectDirectory(top) as project, Writing(project, journals, "call_1") as writer:
        todo = changes(before, after)
        for change in todo:
            file = after.get(change.path)
            if isinstance(file, tuple):
                with writer.add(change.path) as staged:
                    staged.write(file[0])
        writer.write(todo, directories(after))


@pytest.fixture
def journals(tmp_path: Path) -> Journals:
    """Journals that record in a file whether they are needed."""

    def need(is_needed: bool) -> None:
        if is_needed:
            needed(tmp_path).touch()
        else:
            needed(tmp_path).unlink(missing_ok=True)

    return Journals(tmp_path / "journals", need)


def needed(base: Path) -> Path:
    return base / "needed"


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return tmp_path / "project"


BEFORE: Files = {
    "a.txt": (b"one\ntwo\n", False),
    "run.sh": (b"#!/bin/sh\n", True),
    "d/inner/deep.txt": (b"deep\n", False),
    "d/other.txt": (b"other\n", False),
    "was-file": (b"file\n", False),
    "was-directory/x": (b"x\n", False),
    "link": "a.txt",
}
AFTER: Files = {
    "a.txt": (b"one\n2\n", False),
    "run.sh": (b"#!/bin/sh\n", False),
    "d/other.txt": (b"other\n", False),
    "was-file/now": (b"directory\n", False),
    "was-directory": (b"now a file\n", True),
    "link": "run.sh",
    "new/made/here.bin": (bytes(range(256)), False),
}


# -- against git ---------------------------------------------------------------------------

TEXT = st.lists(st.sampled_from(["a", "b", "", "ä", "+x", "-y", "@@"]), max_size=8).map("\n".join)
CONTENT = st.builds(
    lambda text, ends: (text + ("\n" if ends else "")).encode(), TEXT, st.booleans()
)
FILE: st.SearchStrategy[File] = st.one_of(
    st.tuples(CONTENT, st.booleans()),
    st.sampled_from(["no", "no/h"]),  # git stumbles over loops
)
PATHS = st.sampled_from(["f", "g", "g/h", "g/i/j", "k k", 'q"\\', "ü", "m/n"])
TREES = st.dictionaries(PATHS, FILE, max_size=6).map(
    lambda files: {
        path: file
        for path, file in files.items()
        if not any(other.startswith(f"{path}/") for other in files)
    }
)


@given(before=TREES, after=TREES)
def test_result_is_that_of_git_apply(tmp_path_factory: Any, before: Files, after: Files) -> None:
    base = tmp_path_factory.mktemp("both")
    ours, gits = base / "ours", base / "gits"
    for one in (ours, gits):
        build(one, before)
    old, new = (
        {path: file[0] for path, file in files.items() if isinstance(file, tuple)}
        for files in (before, after)
    )

    apply(ours, Journals(base / "journals"), before, after)
    patch, is_cut = patch_of(changes(before, after), (), old, new)

    assert found(ours) == after
    assert not is_cut
    if patch:
        subprocess.run(["git", "init", "-q", str(gits)], check=True)
        command = ["git", "-C", str(gits), "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, input=patch.encode(), check=True)
    assert found(gits) == after


# -- the host's files ----------------------------------------------------------------------


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTS_CHANGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda top: (top / "a.txt").write_text("mine\n"),
    "mode": lambda top: (top / "a.txt").chmod(0o755),
    "deleted": lambda top: (top / "a.txt").unlink(),
    "link": lambda top: replace_by_link(top / "a.txt"),
    "directory": lambda top: replace_by_directory(top / "a.txt"),
    "in-the-way": lambda top: (top / "new").write_text("mine\n"),
    "parent-link": lambda top: ((top / "d").rename(top / "e"), (top / "d").symlink_to("e")),
    "not-empty": lambda top: (top / "was-directory/mine").write_text("mine\n"),
}


@pytest.mark.parametrize("what", HOSTS_CHANGES)
def test_nothing_is_written_if_the_host_changes_a_file_in_that_moment(
    what: str, top: Path, journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(top, BEFORE)
    begin = writing._do
    has_changed = False

    def interrupted(*arguments: Any) -> None:
        nonlocal has_changed
        if not has_changed:
            has_changed = True
            HOSTS_CHANGES[what](top)
        begin(*arguments)

    monkeypatch.setattr(writing, "_do", interrupted)
    expected = top.parent / "expected"
    build(expected, BEFORE)
    HOSTS_CHANGES[what](expected)
    with pytest.raises(Conflicts):
        apply(top, journals, BEFORE, AFTER)
    assert found(top) == found(expected)
    assert not list(top.glob(f"{STAGING_PREFIX}*"))


def test_file_that_appears_while_all_is_put_back_is_kept_beside_the_old_one(
    top: Path, journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(top, BEFORE)
    put_back = writing._put_back

    def interrupted(*arguments: Any) -> bool:
        build(top, {"d/inner/deep.txt": (b"mine\n", False)})
        return put_back(*arguments)

    monkeypatch.setattr(writing, "_put_back", interrupted)
    (top / "link").unlink()  # the conflict, after the deletions
    with pytest.raises(OutcomeUnknown, match="somebody else changed it meanwhile"):
        apply(top, journals, BEFORE, AFTER)
    after = found(top)
    assert after["d/inner/deep.txt"] == (b"mine\n", False)
    (kept,) = [path for path in after if path.startswith("d/inner/deep.txt.before-")]
    assert after[kept] == BEFORE["d/inner/deep.txt"]
    assert after["was-file"] == BEFORE["was-file"]


def test_project_that_cannot_be_put_back_now_is_put_back_by_the_next_engine(
    top: Path, journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(top, BEFORE)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        patch.setattr(writing, "_take_away", full)
        with pytest.raises(OutcomeUnknown, match="tries again when it starts"):
            apply(top, journals, BEFORE, AFTER)
    assert found(top) != BEFORE
    assert journals.recover().failed == []
    assert found(top) == BEFORE


def test_full_disk_changes_nothing(
    top: Path, journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(top, BEFORE)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StateUnavailable, match="No space left"):
        apply(top, journals, BEFORE, AFTER)
    assert found(top) == BEFORE


def test_project_that_is_a_link_now_is_refused(top: Path, journals: Journals) -> None:
    build(top.parent / "elsewhere", BEFORE)
    top.symlink_to("elsewhere")
    with pytest.raises(InvalidParams):
        apply(top, journals, BEFORE, AFTER)
    assert found(top.parent / "elsewhere") == BEFORE


# -- crashes -------------------------------------------------------------------------------

STEPS = ("rename", "link", "symlink", "unlink", "mkdir", "rmdir", "fchmod", "fsync")
"""Calls that change something; the process is killed before each of them in turn."""


def killed(work: Callable[[], object], number: int, calls: Sequence[str] = STEPS) -> bool:
    """Do some work in a child that is killed before its call of that number; whether it was."""
    child = os.fork()
    if child == 0:
        count = 0
        sync = os.fsync

        def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                # A kill loses nothing of what is only in the kernel's memory.
                return None if call is sync else call(*arguments, **options)

            return counted

        for name in calls:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_project_is_whole_wherever_the_engine_is_killed(top: Path, journals: Journals) -> None:
    """And while it is not, the next engine must be one that can put it back."""
    ends = []
    outcomes = []
    is_needed = needed(top.parent).exists
    for number in range(1, 200):
        shutil.rmtree(top, ignore_errors=True)
        build(top, BEFORE)
        if not killed(lambda: apply(top, journals, BEFORE, AFTER), number):
            break
        assert is_needed() or found(top) in (BEFORE, AFTER), number
        assert is_needed() or not list(top.parent.glob("journals/*.json")), number
        assert is_needed() or not list(top.glob(f"{STAGING_PREFIX}*")), number
        failed, outcome = journals.recover()
        assert failed == []
        assert found(top) in (BEFORE, AFTER), number
        assert not list(top.glob(f"{STAGING_PREFIX}*"))
        assert outcome in ({}, {"call_1": found(top) == AFTER}), number
        assert journals.recover().outcomes == outcome  # until it is stored
        assert is_needed() or not outcome, number
        journals.forget()
        assert not is_needed(), number
        outcomes += outcome.values()
        assert not list((top.parent / "journals").glob("*"))
        ends.append(found(top) == AFTER)
    assert ends.count(False) > 30
    assert ends == sorted(ends)  # first as before, then, from one moment on, with all changes
    assert ends[-1]
    assert len(outcomes) > len(ends) - 13  # not while there is no journal
    assert {False, True} == set(outcomes)
    assert found(top) == AFTER
    assert not is_needed()


def test_journal_that_cannot_be_followed_stays_needed(top: Path, journals: Journals) -> None:
    """Also one of an earlier version, which has recorded nothing."""
    build(top, BEFORE)
    assert killed(lambda: apply(top, journals, BEFORE, AFTER), 40)
    top.rename(top.parent / "away")
    needed(top.parent).unlink()
    for _ in range(2):
        assert journals.recover().failed == [str(top)]
        journals.forget()
        assert needed(top.parent).exists()
    (top.parent / "away").rename(top)
    assert journals.recover() == ([], {"call_1": False})
    journals.forget()
    assert not needed(top.parent).exists()
    assert found(top) == BEFORE


def test_nothing_is_written_if_the_need_cannot_be_recorded(top: Path) -> None:
    def need(is_needed: bool) -> None:
        raise WriteFailed("full")

    build(top, BEFORE)
    with pytest.raises(WriteFailed):
        apply(top, Journals(top.parent / "journals", need), BEFORE, AFTER)
    assert found(top) == BEFORE
    assert not list(top.parent.glob("journals/*"))


def test_write_that_ends_does_not_end_the_need_of_one_that_begins(tmp_path: Path) -> None:
    """Between the record of the need and the journal of the second write, the first one ends."""
    one, other = (_Journal(str(tmp_path), f"{STAGING_PREFIX}{name}", "call_1") for name in "ab")
    noted: list[bool] = []
    ending = threading.Thread(target=lambda: journals.drop(one))

    def need(is_needed: bool) -> None:
        noted.append(is_needed)
        if noted == [True, True]:
            ending.start()
            ending.join(0.5)  # it must wait, so this is as long as it takes

    journals = Journals(tmp_path / "journals", need)
    journals.begin(one)
    journals.begin(other)
    ending.join()
    assert noted[-1] is True
    journals.drop(other)
    assert noted[-1] is False  # twin


def test_need_that_cannot_be_ended_is_ended_by_the_next_start(top: Path) -> None:
    build(top, BEFORE)
    noted: list[bool] = []

    def need(is_needed: bool) -> None:
        noted.append(is_needed)
        if not is_needed and len(noted) == 2:
            raise WriteFailed("full")

    journals = Journals(top.parent / "journals", need)
    apply(top, journals, BEFORE, AFTER)
    assert (found(top), noted) == (AFTER, [True, False])
    journals.forget()
    assert noted == [True, False, False]


def test_edit_of_a_new_file_before_the_next_engine_puts_all_back_is_kept(
    top: Path, journals: Journals
) -> None:
    for number in range(40, 200):
        shutil.rmtree(top, ignore_errors=True)
        shutil.rmtree(top.parent / "journals", ignore_errors=True)
        build(top, BEFORE)
        assert killed(lambda: apply(top, journals, BEFORE, AFTER), number)
        file = top / "a.txt"
        if file.exists() and file.read_bytes() == AFTER["a.txt"][0]:
            break
    with file.open("ab") as edited:
        edited.write(b"mine\n")
    assert journals.recover() == ([], {})  # neither all nor nothing
    after = found(top)
    assert after.pop("a.txt") == (b"one\n2\nmine\n", False)
    (kept,) = [path for path in after if path.startswith("a.txt.before-")]
    assert after.pop(kept) == BEFORE["a.txt"]
    assert after == {path: file for path, file in BEFORE.items() if path != "a.txt"}


def test_file_with_the_longest_name_is_put_beside_a_new_one(top: Path, journals: Journals) -> None:
    name = "ü" * 127 + "x"
    before: Files = {name: (b"old\n", False)}
    build(top, before)
    number = 1
    while killed(lambda: apply(top, journals, before, {name: (b"new\n", False)}), number):
        if not (top / name).exists():
            break
        assert journals.recover().failed == []
        shutil.rmtree(top)
        build(top, before)
        number += 1
    (top / name).write_text("mine\n")
    assert journals.recover().failed == []
    assert sorted(path.read_text() for path in top.iterdir()) == ["mine\n", "old\n"]


def test_project_that_cannot_be_written_leaves_no_journal(top: Path, journals: Journals) -> None:
    build(top, BEFORE)
    with ProjectDirectory(top) as project:
        shutil.rmtree(top)
        with pytest.raises(StateUnavailable), Writing(project, journals):
            pass
    assert list((top.parent / "journals").glob("*.json")) == []


def test_recovery_that_is_killed_as_well_is_finished_by_the_next(
    top: Path, journals: Journals
) -> None:
    for number in range(1, 12):
        shutil.rmtree(top, ignore_errors=True)
        build(top, BEFORE)
        assert killed(lambda: apply(top, journals, BEFORE, AFTER), 40)
        killed(journals.recover, number)
        assert journals.recover() == ([], {"call_1": False})
        journals.forget()
        assert found(top) == BEFORE, number


def test_journal_of_a_project_that_is_gone_stays_and_is_told(top: Path, journals: Journals) -> None:
    build(top, BEFORE)
    assert killed(lambda: apply(top, journals, BEFORE, AFTER), 40)
    shutil.rmtree(top)
    assert journals.recover().failed == [str(top)]
