"""A project of the host: into a session as a copy, and back as a diff that a human approved."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from fumehood import Config, Engine, Envelope
from fumehood.approvals.model import Approval, ApprovalQuery
from fumehood.core.errors import InvalidParams, PermissionDenied, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.executors import workspace_guest
from fumehood.executors.effects import unified
from fumehood.projects import service
from fumehood.projects import tree as project_tree
from fumehood.projects.rules import IgnoreRules
from fumehood.sandbox.settings import ContainerSettings, LanguageImages
from fumehood.sandbox.wall import Lease
from fumehood.storage.database import open_database
from support.asking import ALICE, YES, add_approvers
from support.wait import DEADLINE_S

pytestmark = [
    pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image")
]  # fmt: skip

IMAGE = "python"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(home: Path, **container: Any) -> AsyncIterator[Engine]:
    images = LanguageImages(python=IMAGE, shell=IMAGE)
    settings = ContainerSettings(pool_min=0, images=images, **container)
    config = Config(home=home, container=settings)
    database = open_database(home / "state.db")
    try:
        async with Engine(config=config, database=database) as engine:
            yield engine
    finally:
        database.close()


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    async with running(tmp_path_factory.mktemp("home")) as engine:
        await add_approvers(engine)
        yield engine


@pytest.fixture(autouse=True)
async def no_session_is_left(engine: Engine) -> AsyncIterator[None]:
    yield
    for one in engine.sessions.list(engine.owner):
        if not one.state.is_over:
            await engine.sessions.end(engine.owner, one.id)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    for path, text in {
        "calc.py": "def add(a, b):\n    return a - b\n",
        "docs/notes.txt": "old\n",
        "docs/deep/er.txt": "deep\n",
        "run.sh": "#!/bin/sh\necho ran\n",
        ".gitignore": "build/\n*.log\n",
        "build/made": "not copied\n",
        ".git/config": "[core]\n",
        "ü ñ/🙂.txt": "names\n",
    }.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    (top / "run.sh").chmod(0o755)
    (top / "latest").symlink_to("docs/notes.txt")
    (top / "binary").write_bytes(bytes(range(256)) * 300)
    return top


async def session_from(engine: Engine, project: Path, **wishes: Any) -> str:
    claim = engine.projects.claim(str(project), proven=True)
    made = await engine.projects.create(engine.owner, project=claim.id, image=IMAGE, **wishes)
    return made.id


async def shell(engine: Engine, session: str, command: str) -> str:
    answer = await engine.call("run_shell", {"command": command}, session_id=session)
    assert answer.success, answer.error
    told: str = answer.data["stdout"]
    return told


async def changed(engine: Engine, session: str) -> dict[str, Any]:
    found = await engine.projects.difference(engine.owner, session)
    return {one["path"]: one["change"] for one in found["files"]}


async def asked(engine: Engine, session: str) -> tuple[Approval, asyncio.Future[Envelope]]:
    """Ask for the changes to be applied, and wait until a human is asked."""
    calling = asyncio.ensure_future(
        engine.call("apply_workspace", {}, session_id=session, wait_for_approval=True)
    )
    with anyio.fail_after(DEADLINE_S):
        while not (found := (await engine.approvals.list(ApprovalQuery(state="pending"))).items):
            if calling.done():
                pytest.fail(str(calling.result()))
            await anyio.sleep(0.02)
    return found[0], calling


async def approved(engine: Engine, session: str) -> Envelope:
    approval, calling = await asked(engine, session)
    await engine.approvals.decide(approval.id, YES, ALICE, channel="test")
    return await calling


def files_of(top: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(top)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(top.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


EDITS = """
sed -i 's/a - b/a + b/' calc.py
rm -r docs/deep
mv docs/notes.txt docs/renamed.txt
chmod -x run.sh
mkdir new build; printf 'new\\n' > new/file.txt; printf 'x' > build/x; printf 'y' > a.log
ln -sfn docs/renamed.txt latest
printf 'more' >> binary
"""


async def test_changes_come_back_after_a_yes_and_exactly_as_they_were_shown(
    engine: Engine, project: Path
) -> None:
    (project / "build/out").symlink_to("/etc/hosts")  # ignored, so nobody looks at it
    session = await session_from(engine, project)
    copied = await shell(engine, session, "ls -A; cat 'ü ñ/🙂.txt' latest; ./run.sh || sh run.sh")
    assert copied.split() == [
        ".gitignore", "binary", "calc.py", "docs", "latest", "run.sh", "ü", "ñ",
        "names", "old", "ran",
    ]  # fmt: skip
    await shell(engine, session, EDITS)
    expected = {
        "binary": "modified", "calc.py": "modified", "docs/deep/er.txt": "deleted",
        "docs/renamed.txt": "renamed", "latest": "modified", "new/file.txt": "added",
        "run.sh": "mode",
    }  # fmt: skip
    assert await changed(engine, session) == expected
    before = files_of(project)

    approval, calling = await asked(engine, session)

    assert approval.tool == "apply_workspace"
    assert approval.preview is not None
    assert approval.preview["directory"] == str(project)
    assert approval.preview["counts"] == {
        "added": 2, "changed": 4, "removed": 2, "removed_bytes": 9
    }  # fmt: skip
    (calc,) = [one for one in approval.preview["changed"] if one["path"] == "calc.py"]
    assert "-    return a - b\n+    return a + b\n" in calc["diff"]
    assert files_of(project) == before
    await engine.approvals.decide(approval.id, YES, ALICE, channel="test")
    answer = await calling

    assert answer.success, answer.error
    assert {one["path"]: one["change"] for one in answer.data["files"]} == expected
    assert files_of(project) == {
        **{k: v for k, v in before.items() if not k.startswith("docs/")},
        "calc.py": b"def add(a, b):\n    return a + b\n",
        "docs/renamed.txt": b"old\n",
        "new/file.txt": b"new\n",
        "latest": "docs/renamed.txt",
        "binary": bytes(range(256)) * 300 + b"more",
    }
    assert not (project / "run.sh").stat().st_mode & 0o111
    assert not (project / "docs/deep").exists()
    assert await changed(engine, session) == {}
    await shell(engine, session, "echo again >> calc.py")
    assert await changed(engine, session) == {"calc.py": "modified"}
    assert (await approved(engine, session)).success
    assert (project / "calc.py").read_text().endswith("again\n")


async def test_diff_tool_shows_the_model_what_would_be_applied(
    engine: Engine, project: Path
) -> None:
    session = await session_from(engine, project)
    await shell(engine, session, "echo more >> docs/notes.txt; mkfifo pipe; ln -s /etc/passwd out")
    answer = await engine.call("workspace_diff", {}, session_id=session)
    assert answer.success, answer.error
    assert answer.data["diff"].splitlines()[-2:] == [" old", "+more"]
    assert [one["path"] for one in answer.data["files"]] == ["docs/notes.txt"]
    assert sorted(answer.data["unseen"]) == ["out", "pipe"]


async def test_large_changes_are_cut_where_they_are_shown_and_applied_as_a_whole(
    engine: Engine, project: Path
) -> None:
    session = await session_from(engine, project, disk_mb=256)
    code = "open('large.txt', 'w').writelines(f'line {n} of many\\n' for n in range(300_000))"
    answer = await engine.call("run_python", {"code": code}, session_id=session)
    assert answer.success, answer.error
    await shell(engine, session, "seq 1 100000 > long.txt; head -c 3000000 /dev/zero > binary")
    found = await engine.projects.difference(engine.owner, session)
    assert found["truncated"]
    assert len(found["diff"]) < 5 << 20
    sizes = {one["path"]: one["bytes"] for one in found["files"]}
    assert sizes["large.txt"] > 5 << 20
    approval, calling = await asked(engine, session)
    added = {one["path"]: one for one in (approval.preview or {})["added"]}
    assert added["large.txt"]["too_large"]
    assert added["long.txt"].get("too_large") or added["long.txt"].get("diff_truncated")
    await engine.approvals.decide(approval.id, YES, ALICE, channel="test")
    assert (await calling).success
    assert (project / "large.txt").stat().st_size == sizes["large.txt"]
    assert (project / "long.txt").read_text().count("\n") == 100_000
    assert (project / "binary").read_bytes() == bytes(3_000_000)


KEEPS_A_MAP = """
import ctypes, mmap, os, platform, sys, threading
kernel = ctypes.CDLL(None)
maps = []
for name in ("docs/notes.txt", "docs/deep/er.txt"):
    file = open(name, "r+b")
    maps.append(mmap.mmap(file.fileno(), 0))
    maps[-1][0:1] = maps[-1][0:1]  # the time of the first write
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(maps[0])))
assert kernel.mprotect(at, 4096, mmap.PROT_READ) == 0
assert kernel.prctl(4, int(sys.argv[1] != "hidden"), 0, 0, 0) == 0
def write():
    while sys.argv[1] == "other thread" and ") Z" not in open(f"/proc/{os.getpid()}/stat").read():
        os.sched_yield()
    print("ready", flush=True)
    for line in sys.stdin:
        assert kernel.mprotect(at, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        for one in maps:
            one[0:1] = b"X"
        assert kernel.mprotect(at, 4096, mmap.PROT_READ) == 0
        print("written", flush=True)
if sys.argv[1] == "other thread":  # the first one ends, and has no maps any more
    threading.Thread(target=write).start()
    kernel.syscall(60 if platform.machine() == "x86_64" else 93, 0)
write()
"""


async def until_it_says(engine: Engine, session: str, word: str) -> None:
    with anyio.fail_after(DEADLINE_S):
        while True:
            answer = await engine.call("read_process", {"name": "keeper"}, session_id=session)
            assert answer.success, answer.error
            if word in str(answer.data):
                return
            await anyio.sleep(0.02)


@pytest.mark.parametrize("how", ["hidden", "read-only", "other thread"])
@pytest.mark.parametrize("runtime", [None, pytest.param("runsc", marks=pytest.mark.needs("runsc"))])
async def test_attack_process_that_keeps_a_map_hides_no_change_on_a_disk(
    tmp_path: Path, project: Path, runtime: str | None, how: str
) -> None:
    """Of the second write to a page the file's times tell nothing. Twin: nothing but the first."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    async with running(home, runtime=runtime) as engine:
        await add_approvers(engine)
        session = await session_from(engine, project, disk_mb=64)
        argv = ["python3", "-c", KEEPS_A_MAP, how]
        start = {"name": "keeper", "argv": argv}
        assert (await engine.call("start_process", start, session_id=session)).success
        await until_it_says(engine, session, "ready")
        for _ in range(2):  # the second time, what the first one has read is known
            assert await changed(engine, session) == {}
        write = {"name": "keeper", "text": "go\n"}
        answer = await engine.call("write_process", write, session_id=session)
        assert answer.success, answer.error
        await until_it_says(engine, session, "written")
        assert await changed(engine, session) == {
            "docs/deep/er.txt": "modified", "docs/notes.txt": "modified"
        }  # fmt: skip
        await engine.sessions.end(engine.owner, session)


# -- what cannot come back -----------------------------------------------------------------


async def test_git_hooks_and_links_that_leave_the_project_never_come_back(
    engine: Engine, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret\n")
    session = await session_from(engine, project)
    await shell(
        engine, session,
        "mkdir -p .git/hooks sub/.git; printf '#!/bin/sh\\n' > .git/hooks/pre-commit; "
        "echo x > sub/.git/config; ln -s ../../../tmp up; ln -s docs/../../secret way; "
        "rm -r docs; ln -s /etc docs; ln -s .git/hooks/pre-commit hook; mkdir d; "
        "ln -s ../.GIT d/up; ln -s calc.py near; echo fine > fine",
    )  # fmt: skip
    answer = await approved(engine, session)
    assert answer.success, answer.error
    assert files_of(project / ".git") == {"config": b"[core]\n"}
    assert (project / "fine").read_text() == "fine\n"
    assert (project / "near").readlink() == Path("calc.py")
    left_out = [project / name for name in ("sub", "up", "way", "docs/passwd", "hook", "d/up")]
    assert not any(path.exists() or path.is_symlink() for path in left_out)
    assert (tmp_path / "secret").read_text() == "secret\n"


async def test_hidden_repository_whose_settings_git_would_run_never_comes_back(
    engine: Engine, project: Path
) -> None:
    session = await session_from(engine, project)
    await shell(
        engine, session,
        "mkdir -p lib/objects lib/refs; touch lib/objects/x lib/refs/x fine; "
        "echo 'ref: refs/heads/main' > lib/HEAD; "
        "printf '[core]\\n\\tfsmonitor = touch ran\\n' > lib/config",
    )  # fmt: skip
    assert await changed(engine, session) == {"fine": "added"}
    assert (await approved(engine, session)).success
    assert not (project / "lib").exists()
    await shell(engine, session, "rm lib/HEAD")
    assert len(await changed(engine, session)) == 3
    assert (await approved(engine, session)).success
    await shell(engine, session, "echo 'ref: refs/heads/main' > lib/HEAD")
    assert await changed(engine, session) == {}
    await engine.sessions.end(engine.owner, session)


async def test_session_cannot_write_the_proof_that_names_a_directory_of_the_host(
    engine: Engine, project: Path
) -> None:
    (project / "build/secret").write_text("left out by a rule\n")
    session = await session_from(engine, project)
    claim = engine.projects.claim(str(project), everything=True)
    inner = engine.projects.claim(str(project / "docs"), everything=True)
    await shell(
        engine, session,
        f"touch {claim.proof} docs/{inner.proof} fine; mkdir -p .GIT/hooks; echo > .GIT/hooks/x",
    )  # fmt: skip
    found = await engine.projects.difference(engine.owner, session)
    assert [one["path"] for one in found["files"]] == ["fine"]
    assert sorted(found["unseen"]) == sorted([claim.proof, f"docs/{inner.proof}", ".GIT"])
    assert (await approved(engine, session)).success
    assert (project / "fine").exists()
    for one in (claim, inner):
        with pytest.raises(PermissionDenied):
            await engine.projects.create(engine.owner, project=one.id, image=IMAGE)
    await engine.sessions.end(engine.owner, session)


async def test_nothing_is_written_if_the_host_changes_files_after_the_diff_was_shown(
    engine: Engine, project: Path
) -> None:
    names = ["added", "calc.py", "docs/deep/er.txt", "latest", "run.sh"]
    session = await session_from(engine, project)
    await shell(
        engine, session,
        "echo x >> calc.py; echo x > added; echo x >> docs/notes.txt; echo x >> docs/deep/er.txt; "
        "ln -sfn docs latest; echo x >> run.sh",
    )  # fmt: skip
    approval, calling = await asked(engine, session)
    (project / "added").write_text("mine\n")
    (project / "calc.py").write_text("mine\n")
    for name in names[2:]:
        (project / name).unlink()
    (project / "latest").mkdir()
    (project / "run.sh").symlink_to("calc.py")
    before = files_of(project)
    await engine.approvals.decide(approval.id, YES, ALICE, channel="test")
    answer = await calling
    assert answer.error is not None
    assert answer.error.code == "INVALID_PARAMS"
    assert answer.error.details is not None
    assert sorted(answer.error.details["conflicts"]) == names
    assert files_of(project) == before
    found = await engine.projects.difference(engine.owner, session)
    assert sorted(one["path"] for one in found["files"] if one.get("conflict")) == names


async def test_conflict_names_its_base_and_the_recipe_of_the_docs_solves_it(
    tmp_path: Path, project: Path
) -> None:
    """The steps of `docs/howto/let-an-agent-work-on-your-project.md`, with git. The base survives
    the engine.
    """
    shutil.rmtree(project / ".git")
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}

    async def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.test")
        await anyio.run_process(["git", "-C", str(project), *who, *words], env=quiet)

    async def commit() -> None:
        await git("add", "-A")
        await git("commit", "-qm", "x")

    async def conflicts_of(engine: Engine) -> JsonObject:
        answer = await engine.call("apply_workspace", {}, session_id=session)
        assert answer.error is not None
        assert answer.error.details is not None
        told: JsonObject = answer.error.details["conflicts"]
        assert all(f"{path} {why}" in answer.error.message for path, why in told.items())
        return told

    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (project / "calc.py").write_text("".join(f"line {n}\n" for n in range(30)))
    await git("init", "-q")
    await commit()
    async with running(home) as engine:
        await add_approvers(engine)
        session = await session_from(engine, project)
        await shell(engine, session, "sed -i 's/^line 9$/the session/' calc.py")
        assert (await approved(engine, session)).success
        await commit()  # after each `apply`
        await shell(engine, session, "sed -i 's/^line 20$/again/' calc.py; echo x > docs/notes.txt")
    with (project / "calc.py").open("a") as file:
        file.write("mine\n")
    (project / "docs/notes.txt").write_text("mine\n")
    async with running(home) as engine:
        assert await conflicts_of(engine) == {
            "calc.py": "is not as it was last applied",
            "docs/notes.txt": "is not as it was copied",
        }
        # By hand: the same on both sides.
        (project / "docs/notes.txt").write_text("x, mine\n")
        await shell(engine, session, "echo x, mine > docs/notes.txt")
        assert list(await conflicts_of(engine)) == ["calc.py"]
        (project / "docs/notes.txt").write_text("old\n")
        await git("stash")
        assert (await approved(engine, session)).success
        await commit()
        await git("stash", "pop")
        merged = (project / "calc.py").read_text().splitlines()
        assert [merged[9], merged[20], merged[-1]] == ["the session", "again", "mine"]
        await engine.sessions.end(engine.owner, session)


async def test_same_change_on_both_sides_is_no_conflict(engine: Engine, project: Path) -> None:
    session = await session_from(engine, project)
    await shell(engine, session, "echo x > calc.py; echo y > added")
    (project / "calc.py").write_text("x\n")
    assert await changed(engine, session) == {"added": "added"}
    assert (await approved(engine, session)).success
    assert (project / "added").read_text() == "y\n"


async def test_more_changes_than_can_be_shown_are_refused(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.projects.service.MAX_LISTED", 3)
    session = await session_from(engine, project)
    await shell(engine, session, "touch a b c d")
    answer = await engine.call("apply_workspace", {}, session_id=session)
    assert answer.error is not None
    assert "4 files have changed" in answer.error.message
    assert (await engine.approvals.list(ApprovalQuery(state="pending"))).items == ()
    await shell(engine, session, "rm d")
    assert (await approved(engine, session)).success
    await engine.sessions.end(engine.owner, session)


async def test_session_without_a_project_has_nothing_to_apply(engine: Engine) -> None:
    made = await engine.projects.create(engine.owner, image=IMAGE)
    answer = await engine.call("apply_workspace", {}, session_id=made.id)
    assert answer.error is not None
    assert answer.error.code == "INVALID_PARAMS"
    with pytest.raises(InvalidParams):
        await engine.projects.difference(engine.owner, made.id)
    await engine.sessions.end(engine.owner, made.id)


# -- what cannot be taken in ---------------------------------------------------------------


def not_utf8(top: Path) -> None:
    with open(os.fsencode(top) + b"/bad\xff", "wb"):
        pass


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "link out": (lambda top: (top / "out").symlink_to("../secret"), "out is a link that leaves"),
    "absolute link": (lambda top: (top / "out").symlink_to("/etc/hosts"), "out is a link that"),
    "roundabout link": (lambda top: (top / "out").symlink_to("docs/../../x"), "out is a link with"),
    "pipe": (lambda top: os.mkfifo(top / "pipe"), "pipe is neither a file"),
    "name": (not_utf8, "has a name that cannot be used"),
    "closed": (lambda top: (top / "docs").chmod(0), "docs cannot be read"),
    "deep": (lambda top: (top / "/".join("d" * 70)).mkdir(parents=True), "nested too deeply"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_project_with_what_cannot_be_copied_is_refused_by_name(
    engine: Engine, project: Path, what: str
) -> None:
    if what == "closed" and os.geteuid() == 0:
        what = "pipe"  # root reads everything
    make, words = REFUSED[what]
    make(project)
    before = len(engine.sessions.list(engine.owner))
    with pytest.raises(InvalidParams) as refused:
        await session_from(engine, project)
    assert words in refused.value.message
    assert len(engine.sessions.list(engine.owner)) == before


async def test_file_that_a_rule_names_as_a_directory_is_not_taken_for_deleted(
    engine: Engine, project: Path
) -> None:
    kept = {"scripts/build": "a script\n", "sub/.gitignore": "!made\n", "sub/made": "kept\n"}
    for path, text in kept.items():
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text(text)
    with (project / ".gitignore").open("a") as rules:
        rules.write("made\n")
    session = await session_from(engine, project)
    assert await changed(engine, session) == {}
    await shell(engine, session, "printf 'docs\\ncalc.py\\n' >> .gitignore; echo x >> calc.py")
    assert await changed(engine, session) == {".gitignore": "modified", "calc.py": "modified"}
    await shell(engine, session, "mkdir -p new/build; touch new/build/ignored docs/deep/build")
    assert (await changed(engine, session)).keys() == {".gitignore", "calc.py"}  # "docs" is ignored
    await shell(engine, session, "printf 'build/\n' > .gitignore")
    assert "docs/deep/build" in await changed(engine, session)
    await engine.sessions.end(engine.owner, session)


async def test_project_with_too_many_files_is_refused(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_tree, "MAX_FILES", 5)
    with pytest.raises(InvalidParams, match="more than 5 files"):
        await session_from(engine, project)


async def test_project_larger_than_the_workspace_is_refused(engine: Engine, project: Path) -> None:
    with (project / "large").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(InvalidParams, match="301 MB") as refused:
        await session_from(engine, project)
    assert "disk" in refused.value.message


async def test_file_that_changes_while_the_project_is_read_is_named(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = project_tree.ProjectDirectory.look

    def changing(self: Any, **options: Any) -> Any:
        found = look(self, **options)
        (project / "calc.py").write_text("changed meanwhile\n")
        return found

    monkeypatch.setattr(project_tree.ProjectDirectory, "look", changing)
    with pytest.raises(InvalidParams, match="calc\\.py changed while the project was read"):
        await session_from(engine, project)


async def test_session_with_too_many_files_says_so(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await session_from(engine, project)
    monkeypatch.setattr(workspace_guest, "MAX_FILES", 20)
    await shell(engine, session, "mkdir build many; touch build/$(seq -s ' build/' 50)")
    assert await changed(engine, session) == {}
    await shell(engine, session, "touch many/$(seq -s ' many/' 50)")
    with pytest.raises(InvalidParams, match="more than 20 files"):
        await engine.projects.difference(engine.owner, session)


async def test_guest_that_names_files_without_end_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = 0

    async def hostile(_: Any, asked: JsonObject, model: type[workspace_guest.Scanned]) -> Any:
        nonlocal pages
        pages += 1
        row = (f"f{pages:09}", 0, False, "1")
        return model(rows=[row], has_more=pages < 1000, too_many=False, others=["x"] * 10)

    monkeypatch.setattr(workspace_guest, "answer_of", hostile)
    monkeypatch.setattr(workspace_guest, "MAX_FILES", 200)
    with pytest.raises(workspace_guest.NotRead, match="more than 200 links"):
        await workspace_guest.scan(cast("Lease", None))
    assert pages == 21


async def test_nothing_is_staged_or_written_of_what_a_session_changes_after_the_look(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    write = service._Staging._write

    def counted(staging: Any, path: str, piece: bytes) -> None:
        staged.append(len(piece))
        write(staging, path, piece)

    monkeypatch.setattr(service._Staging, "_write", counted)
    session = await session_from(engine, project)
    await shell(engine, session, "echo x >> calc.py; head -c 700000 /dev/urandom > big")
    before = files_of(project)
    approval, calling = await asked(engine, session)
    await shell(
        engine, session, "for n in 1 2 3; do truncate -s 5M large$n; done; echo y > calc.py"
    )
    await engine.approvals.decide(approval.id, YES, ALICE, channel="test")
    answer = await calling
    assert answer.error is not None
    assert answer.error.code == "APPROVAL_EXPIRED"
    assert staged == []
    assert files_of(project) == before
    await shell(engine, session, "rm large*")
    assert (await approved(engine, session)).success
    assert sum(staged) == (project / "calc.py").stat().st_size + 700_000


HOSTILE = "printf '[core]\\n\\tfsmonitor = touch ran\\n' >"
TOGETHER = (
    (
        "mkdir -p a/objects; echo > a/objects/x",
        f"mkdir -p a/refs; echo 'ref: x' > a/HEAD; echo > a/refs/x; {HOSTILE} a/config",
        {"a/HEAD", "a/config", "a/refs/x"},
    ),
    (
        f"mkdir -p b/refs; echo 'ref: x' > b/HEAD; echo > b/refs/x; {HOSTILE} b/config",
        "mkdir -p b/objects; echo > b/objects/x",
        {"b/objects/x"},
    ),
    (
        f"mkdir c; echo 'ref: x' > c/HEAD; {HOSTILE} c/config",
        "mkdir c; echo .. > c/commondir",
        {"c/commondir"},
    ),
    ("mkdir -p d/objects; echo > d/objects/x", "mkdir d; echo > d/HEAD", set[str]()),
)
"""What one session adds, what another one adds, and what of that would make a repository."""


async def test_two_sessions_of_a_project_cannot_make_a_repository_together(
    engine: Engine, project: Path
) -> None:
    sessions = [await session_from(engine, project) for _ in range(2)]
    await shell(engine, sessions[0], "; ".join(first for first, _, _ in TOGETHER))
    assert (await approved(engine, sessions[0])).success
    await shell(engine, sessions[1], "; ".join(second for _, second, _ in TOGETHER))
    found = await engine.projects.difference(engine.owner, sessions[1])
    conflicts = {one["path"]: one["conflict"] for one in found["files"] if "conflict" in one}
    refused = set().union(*(paths for _, _, paths in TOGETHER))
    assert conflicts == dict.fromkeys(refused, "would be part of a git repository")
    before = files_of(project)
    answer = await engine.call("apply_workspace", {}, session_id=sessions[1])
    assert answer.error is not None
    assert "would be part of a git repository" in answer.error.message
    assert files_of(project) == before
    await shell(engine, sessions[1], f"rm {' '.join(refused)}")
    assert (await approved(engine, sessions[1])).success
    assert (project / "d/HEAD").exists()


ONE_BY_ONE = {
    "at the top": [
        (f"{HOSTILE} config; mkdir objects; echo > objects/x", True),
        ("mkdir refs; echo > refs/x", True),
        ("echo 'ref: refs/heads/x' > HEAD", False),
    ],
    "at the top, by another directory": [(f"{HOSTILE} config; echo x > HEAD", True),
                                         ("echo docs > commondir", False)],
    "at the top, in other letters": [(f"{HOSTILE} config; mkdir Objects; echo > Objects/x", True),
                                     ("mkdir REFS; echo > REFS/x; echo x > head", False)],
    "below, in other letters": [(f"mkdir lib; {HOSTILE} lib/config; echo x > lib/HEAD", True),
                                ("mkdir LIB; echo .. > LIB/commondir", False)],
    "twin": [("mkdir objects refs; echo > objects/x; echo > refs/x; echo > config", True),
             ("echo > HEAD.md; echo > docs/HEAD", True)],
}  # fmt: skip
"""Steps of one session, each with whether it is applied after a yes."""


@pytest.mark.parametrize("how", ONE_BY_ONE)
async def test_attack_no_repository_is_made_by_approvals_that_look_harmless(
    engine: Engine, project: Path, how: str
) -> None:
    session = await session_from(engine, project)
    for step, is_applied in ONE_BY_ONE[how]:
        await shell(engine, session, step)
        before = files_of(project)
        if is_applied:
            assert (await approved(engine, session)).success, step
            assert files_of(project) != before
            continue
        found = await engine.projects.difference(engine.owner, session)
        unseen = {path.rpartition("/")[2] for path in found["unseen"]}
        named = {one["path"].rpartition("/")[2] for one in found["files"] if one.get("conflict")}
        assert {"HEAD", "head", "commondir"} & (unseen | named)
        answer = await engine.call("apply_workspace", {}, session_id=session)
        assert answer.error is not None, step
        assert files_of(project) == before
    await engine.sessions.end(engine.owner, session)


async def test_attack_git_runs_nothing_of_what_a_session_brought(
    engine: Engine, project: Path, tmp_path: Path
) -> None:
    """Control: with the rest of the session's files, git runs what `config` names."""
    shutil.rmtree(project / ".git")
    mark = tmp_path / "ran"
    session = await session_from(engine, project)
    await shell(
        engine, session,
        f"mkdir -p objects refs; echo > objects/x; echo > refs/x; echo 1 > a; "
        f"printf '[core]\\n\\tbare = false\\n\\tfsmonitor = touch {mark}; false\\n' > config",
    )  # fmt: skip
    assert (await approved(engine, session)).success
    await shell(engine, session, "echo 'ref: refs/heads/main' > HEAD")
    answer = await engine.call("apply_workspace", {}, session_id=session)
    assert answer.error is not None
    quiet = {
        **os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CEILING_DIRECTORIES": str(tmp_path)
    }  # fmt: skip
    git = ["git", "-c", f"safe.directory={project}", "-C", str(project), "--work-tree=.", "status"]
    await anyio.run_process(git, env=quiet, check=False)
    assert not mark.exists()
    (project / "HEAD").write_text("ref: refs/heads/main\n")
    await anyio.run_process(git, env=quiet, check=False)
    assert mark.exists()
    await engine.sessions.end(engine.owner, session)


async def test_approver_is_told_what_his_tools_execute(engine: Engine, project: Path) -> None:
    session = await session_from(engine, project)
    await shell(
        engine, session, "mkdir -p .vscode; echo > .vscode/tasks.json; echo > .envrc; echo > plain"
    )
    approval, calling = await asked(engine, session)
    assert approval.preview is not None
    assert approval.preview["executed"] == [
        {"path": ".envrc", "by": "direnv"}, {"path": ".vscode/tasks.json", "by": "editors"}
    ]  # fmt: skip
    await engine.approvals.decide(approval.id, YES, ALICE, channel="test")
    assert (await calling).success  # shown, not refused
    assert (project / ".envrc").exists()
    await engine.sessions.end(engine.owner, session)


async def test_new_rules_hold_after_they_were_applied(engine: Engine, project: Path) -> None:
    session = await session_from(engine, project)
    await shell(engine, session, "echo '*.env' >> .gitignore; echo x > secret.env")
    assert await changed(engine, session) == {".gitignore": "modified"}
    assert (await approved(engine, session)).success
    assert await changed(engine, session) == {}
    await shell(engine, session, "echo '*.log' > .gitignore; rm -f build/made")
    assert await changed(engine, session) == {".gitignore": "modified", "secret.env": "added"}


async def test_files_that_were_left_out_cannot_be_guessed(engine: Engine, project: Path) -> None:
    (project / ".gitignore").write_text(".env\n")
    (project / ".env").write_text("PIN=1234\n")
    session = await session_from(engine, project)
    await shell(engine, session, "rm .gitignore")
    for guess in ("PIN=0000", "PIN=1234"):
        await shell(engine, session, f"echo {guess} > .env")
        found = await engine.projects.difference(engine.owner, session)
        told = {one["path"]: one.get("conflict") for one in found["files"]}
        assert told[".env"] == "is in the way", guess
    assert "1234" not in found["diff"].replace("+PIN=1234", "")


async def test_diffs_do_not_keep_the_engine_busy(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def noted(*arguments: Any) -> Any:
        used.append(threading.get_ident())
        return unified(*arguments)

    monkeypatch.setattr("fumehood.projects.changes.unified", noted)
    session = await session_from(engine, project)
    await shell(engine, session, "echo x >> calc.py")
    assert await changed(engine, session) == {"calc.py": "modified"}
    assert (await approved(engine, session)).success
    assert len(used) >= 2
    assert threading.get_ident() not in used
    await engine.sessions.end(engine.owner, session)


async def test_rules_of_a_session_do_not_keep_the_engine_busy(
    engine: Engine, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    leave_out = IgnoreRules.leave_out

    def noted(self: IgnoreRules, path: str, *, is_directory: bool) -> bool:
        used.append(threading.get_ident())
        return leave_out(self, path, is_directory=is_directory)

    session = await session_from(engine, project)
    await shell(engine, session, "seq -f 'a*%g*b' 3000 > docs/.gitignore; touch docs/ab docs/a9b")
    monkeypatch.setattr(IgnoreRules, "leave_out", noted)
    assert await changed(engine, session) == {"docs/.gitignore": "added", "docs/ab": "added"}
    assert used
    assert threading.get_ident() not in used
    await shell(engine, session, "seq -f 'a*%g*b' 12000 > docs/.gitignore")
    with pytest.raises(InvalidParams, match="too many rules"):
        await engine.projects.difference(engine.owner, session)
    await engine.sessions.end(engine.owner, session)


# -- who may name a directory --------------------------------------------------------------


async def test_directory_is_used_only_with_the_proof_in_it(engine: Engine, project: Path) -> None:
    claim = engine.projects.claim(str(project))
    owner = engine.owner
    with pytest.raises(PermissionDenied):
        await engine.projects.create(owner, project=claim.id, image=IMAGE)
    proof = project / claim.proof
    proof.symlink_to(project / "calc.py")
    with pytest.raises(PermissionDenied):
        await engine.projects.create(owner, project=claim.id, image=IMAGE)
    proof.unlink()
    proof.touch()
    made = await engine.projects.create(owner, project=claim.id, image=IMAGE)
    assert made.project == "project"
    assert not proof.exists()
    with pytest.raises(ResourceNotFound):
        await engine.projects.create(owner, project="proj_" + "0" * 32, image=IMAGE)
    await engine.sessions.end(owner, made.id)


# -- later engines -------------------------------------------------------------------------


async def test_next_engine_knows_what_was_copied_in(tmp_path: Path, project: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    async with running(home) as engine:
        await add_approvers(engine)
        session = await session_from(engine, project)
        await shell(engine, session, "echo x >> calc.py")
    async with running(home) as engine:
        assert await changed(engine, session) == {"calc.py": "modified"}
        assert (await approved(engine, session)).success
        assert await changed(engine, session) == {}
    async with running(home) as engine:
        assert await changed(engine, session) == {}
        await engine.sessions.end(engine.owner, session)


async def test_fork_has_the_project_and_only_one_of_two_equal_changes_is_written(
    engine: Engine, project: Path
) -> None:
    first = await session_from(engine, project, disk_mb=64)
    await shell(engine, first, "echo first >> calc.py")
    (fork,) = await engine.snapshots.fork(engine.owner, first)
    assert fork.project == "project"
    await shell(engine, fork.id, "echo second >> calc.py; echo x > of-fork")
    assert await changed(engine, fork.id) == {"calc.py": "modified", "of-fork": "added"}
    assert (await approved(engine, first)).success
    answer = await engine.call("apply_workspace", {}, session_id=fork.id)
    assert answer.error is not None
    assert answer.error.details is not None
    assert list(answer.error.details["conflicts"]) == ["calc.py"]
    assert "calc.py is not as it was copied" in answer.error.message
    assert (await engine.approvals.list(ApprovalQuery(state="pending"))).items == ()
    await engine.sessions.end(engine.owner, first)
    assert (await changed(engine, fork.id))["of-fork"] == "added"
    await engine.sessions.end(engine.owner, fork.id)


@pytest.mark.needs("runsc")
async def test_project_works_on_gvisor(tmp_path: Path, project: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    async with running(home, runtime="runsc") as engine:
        await add_approvers(engine)
        session = await session_from(engine, project)
        await shell(engine, session, EDITS)
        assert len(await changed(engine, session)) == 7
        assert (await approved(engine, session)).success
        assert (project / "calc.py").read_text().endswith("a + b\n")
        await engine.sessions.end(engine.owner, session)
