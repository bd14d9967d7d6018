"""Trials of programs in durable sessions: a human sees the effect before it is put in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, Envelope
from fumehood.approvals.model import Approval, ApprovalQuery, NewDecision
from fumehood.durable.saver import SessionSaver
from fumehood.gateway.settings import GatewaySettings
from fumehood.registry.secrets import SecretSettings
from fumehood.sandbox.session import NotSaved
from fumehood.sandbox.settings import ContainerSettings, LanguageImages
from fumehood.storage.database import open_database
from fumehood.trials.in_engine import Trials
from support.asking import ALICE, NO, YES, add_approvers
from support.gateway import names_here
from support.wait import DEADLINE_S
from upstream import Upstream, running_upstream

pytestmark = [
    pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image")
]  # fmt: skip

HOST = "api.example.test"
SECRET = "s3cret-of-the-api/1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def names() -> Iterator[None]:
    with names_here(HOST):
        yield


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Engine]:
    with closing(open_database(config.state_directory / "state.db")) as database:
        async with Engine(config=config, database=database) as engine:
            await add_approvers(engine)
            yield engine


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    config = Config(
        home=tmp_path_factory.mktemp("home"),
        gateway=GatewaySettings(hosts=(HOST,), allowed_hosts=(HOST,), writes="allow"),
        secrets={"api": SecretSettings(env="API_KEY", hosts=(HOST,), inside="API_KEY")},
        container=ContainerSettings(pool_min=0, images=LanguageImages(python="python")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", SECRET)
        async with running(config) as engine:
            yield engine


@pytest.fixture
async def session(engine: Engine) -> AsyncIterator[str]:
    made = await engine.sessions.create(
        engine.owner, image="python", durable=True, env={"A": "of the session"}
    )
    yield made.id
    await engine.sessions.end(engine.owner, made.id)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with running_upstream() as running:
        yield running


async def waiting(engine: Engine) -> Approval:
    """The effect that waits for a human."""
    with anyio.fail_after(DEADLINE_S):
        while not (found := (await engine.approvals.list(ApprovalQuery(state="pending"))).items):
            await anyio.sleep(0.02)
    return found[0]


class Trial:
    """A trial that waits for a human, until the block ends."""

    def __init__(self, engine: Engine, tool: str, arguments: Any, options: Any) -> None:
        self._engine = engine
        self._calling = asyncio.ensure_future(engine.call(tool, arguments, **options))

    async def __aenter__(self) -> Trial:
        looking = asyncio.ensure_future(waiting(self._engine))
        done, _ = await asyncio.wait((self._calling, looking), return_when="FIRST_COMPLETED")
        if self._calling in done:
            looking.cancel()
            pytest.fail(str(self._calling.result()))
        self.approval = looking.result()
        return self

    async def decide(self, decision: NewDecision) -> Envelope:
        await self._engine.approvals.decide(self.approval.id, decision, ALICE, channel="test")
        return await self._calling

    async def __aexit__(self, *exc: Any) -> None:
        self._calling.cancel()
        await asyncio.wait((self._calling,))


def trial(engine: Engine, session: str, code: str, **options: Any) -> Trial:
    options = {"session_id": session, "preview": True, **options}
    return Trial(engine, "run_python", {"code": code}, options)


async def value(engine: Engine, session: str, code: str) -> Any:
    answer = await engine.call("run_python", {"code": code}, session_id=session)
    assert answer.success, answer.error
    return answer.data["value"]


async def tree(engine: Engine, session: str) -> str:
    """All files with their content, without touching the variables."""
    command = "find . -type d | sort; find . -type f | sort | xargs -r grep -H ''; true"
    answer = await engine.call("run_shell", {"command": command}, session_id=session)
    assert answer.success, answer.error
    told: str = answer.data["stdout"]
    return told


async def test_effect_is_shown_to_expire_when_its_call_waits_no_longer(
    engine: Engine, session: str
) -> None:
    async with trial(engine, session, "open('a', 'w').write('a')") as tried:
        longest = engine.approvals.requests.settings.max_wait_seconds
        approval = tried.approval
        assert approval.expires_at - approval.created_at <= timedelta(seconds=longest)
        assert longest < engine.approvals.requests.settings.expire_seconds  # the control
        await tried.decide(NO)


async def test_effect_is_seen_first_and_put_in_after_the_yes(engine: Engine, session: str) -> None:
    await value(
        engine,
        session,
        """
import os
x = ['old']
for name in ('a', 'b', 'c'): open(name, 'w').write(name)
os.mkdir('d'); open('d/e', 'w').write('e')
""",
    )
    before = await tree(engine, session)
    code = """
import os, shutil
x.append('new')
open('a', 'w').write('changed'); os.remove('b'); shutil.rmtree('d')
os.mkdir('n'); open('n/f', 'w').write('f')
print(os.environ['A'])
"""
    async with trial(engine, session, code) as tried:
        preview = tried.approval.preview
        assert preview is not None
        assert preview["printed"] == "of the session\n"
        assert [one["path"] for one in preview["added"]] == ["n", "n/f"]
        (changed,) = preview["changed"]
        assert (changed["path"], changed["diff"]) == (
            "a",
            "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+changed\n\\ No newline at end of file\n",
        )
        assert [one["path"] for one in preview["removed"]] == ["b", "d", "d/e"]
        # The session is as before, and goes on being used.
        assert await tree(engine, session) == before
        answer = await tried.decide(YES)
    assert answer.success, answer.error
    assert answer.data["stdout"] == "of the session\n"
    assert (await tree(engine, session)).split() == [
        ".", "./n", "./a:changed", "./c:c", "./n/f:f",
    ]  # fmt: skip
    assert await value(engine, session, "x") == ["old", "new"]


async def test_effect_that_is_put_in_but_not_saved_has_the_warning_of_a_call(
    engine: Engine, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in = SessionSaver.put_in

    async def away(*_: Any) -> None:
        raise NotSaved("the bucket is away")

    async def put_in_once_more(*given: Any) -> None:
        await put_in(*given)
        monkeypatch.setattr(SessionSaver, "save", away)

    monkeypatch.setattr(SessionSaver, "put_in", put_in_once_more)
    async with trial(engine, session, "open('a', 'w').write('a')") as tried:
        answer = await tried.decide(YES)
    warning = (
        "session: its files were not saved after this call (the bucket is away); if the session "
        "is restored, it gets the files of an earlier copy"
    )
    assert (answer.success, answer.metadata.warnings) == (True, (warning,))
    call = await engine.call("run_python", {"code": "open('b', 'w')"}, session_id=session)
    assert call.metadata.warnings == (warning,)  # the control
    monkeypatch.undo()
    async with trial(engine, session, "open('b', 'w').write('b')") as tried:
        answer = await tried.decide(YES)
    assert (answer.success, answer.metadata.warnings) == (True, ())  # the twin


async def test_no_leaves_the_session_as_it_was(engine: Engine, session: str) -> None:
    await value(engine, session, "x = 1; open('a', 'w').write('a')")
    before = await tree(engine, session)
    async with trial(engine, session, "x = 2; open('a', 'w').write('b')") as tried:
        answer = await tried.decide(NO)
    assert answer.error is not None
    assert answer.error.code == "PERMISSION_DENIED"
    assert answer.error.details["ended_by"] == "ok"
    assert await tree(engine, session) == before
    assert await value(engine, session, "x") == 1


@pytest.mark.parametrize("is_running", [True, False])
async def test_caller_that_gives_up_leaves_the_session_as_it_was(
    engine: Engine, session: str, is_running: bool
) -> None:
    await value(engine, session, "x = 1")
    code = "x = 2; open('a', 'w').write('b')"
    if is_running:
        looping = {"code": f"{code}\nwhile True: pass"}
        with anyio.move_on_after(1):
            await engine.call("run_python", looping, session_id=session, preview=True)
    else:
        async with trial(engine, session, code):
            pass
    with anyio.fail_after(DEADLINE_S):
        while (await engine.approvals.list(ApprovalQuery(state="pending"))).items:
            await anyio.sleep(0.02)
    assert await tree(engine, session) == ".\n"
    assert await value(engine, session, "x") == 1
    (part,) = [one for one in engine._made.parts if isinstance(one, Trials)]
    assert part.waiting == {}


async def test_trial_that_nobody_decides_on_says_so(engine: Engine, session: str) -> None:
    code = {"code": "x = 2; open('a', 'w').write('b')"}
    answer = await engine.call(
        "run_python", code, session_id=session, preview=True, wait_for_approval=1
    )
    assert answer.error is not None
    assert answer.error.code == "PERMISSION_DENIED"
    assert answer.error.message == "Nobody has decided about it in time, so nothing was put in."
    assert await tree(engine, session) == ".\n"
    assert not (await engine.approvals.list(ApprovalQuery(state="pending"))).items


async def test_effect_expires_if_what_it_touches_has_changed(engine: Engine, session: str) -> None:
    make = {"command": "rm -rf *; echo old > a; mkdir d; echo old > d/e"}
    command = {"command": "echo mine > a; echo mine > n; rm -r d"}
    options = {"session_id": session, "preview": True}

    async def decided(meanwhile: str) -> tuple[Envelope, str]:
        await engine.call("run_shell", make, session_id=session)
        async with Trial(engine, "run_shell", command, options) as tried:
            await engine.call("run_shell", {"command": meanwhile}, session_id=session)
            before = await tree(engine, session)
            return await tried.decide(YES), before

    for meanwhile in ("echo other > a", "echo new > n", "echo new > d/new", "ln -s a n"):
        answer, before = await decided(meanwhile)
        assert answer.error is not None, meanwhile
        assert answer.error.code == "APPROVAL_EXPIRED"
        assert "nothing was put in" in answer.error.message
        assert await tree(engine, session) == before
    answer, _ = await decided("echo other > b")  # twin
    assert answer.success, answer.error
    assert "./a:mine\n./b:other\n./n:mine" in await tree(engine, session)


async def test_python_call_meanwhile_makes_variables_of_a_trial_expire(
    engine: Engine, session: str
) -> None:
    async with trial(engine, session, "x = 'trial'; open('a', 'w').write('a')") as tried:
        await value(engine, session, "x = 'other'")
        answer = await tried.decide(YES)
    assert answer.error is not None
    assert answer.error.code == "APPROVAL_EXPIRED"
    assert await value(engine, session, "x, __import__('os').listdir()") == ["other", []]


async def test_requests_of_a_trial_are_sent_after_the_yes_in_order(
    engine: Engine, session: str, upstream: Upstream
) -> None:
    """Reads pass at once. Twin: a no sends nothing."""
    url = f"http://{HOST}:{upstream.port}"
    code = f"""
import urllib.error, urllib.request
def send(path, data=None):
    try: return urllib.request.urlopen({url!r} + path, data).status
    except urllib.error.HTTPError as error: return error.code
print(send('/read'), send('/one', b'1'), send('/two', b'2'))
"""
    for decision, sent in ((NO, ["/read"]), (YES, ["/read", "/read", "/one", "/two"])):
        async with trial(engine, session, code, network=[HOST]) as tried:
            assert tried.approval.preview is not None
            assert tried.approval.preview["printed"] == "200 403 403\n"
            held = tried.approval.preview["requests"]
            assert [(one["method"], one["path"], one["body"]) for one in held] == [
                ("POST", "/one", "1"), ("POST", "/two", "2"),
            ]  # fmt: skip
            answer = await tried.decide(decision)
        assert answer.success is (decision is YES), answer.error
        assert [request.target for request in upstream.requests] == sent
    assert [request.body for request in upstream.requests[2:]] == [b"1", b"2"]


MAP = """
import mmap, os
file = open('a', 'r+b')
memory = mmap.mmap(file.fileno(), 0)
"""
UNSEEN = {
    "written through a map after a read": f"{MAP}memory[0]; memory[0:1] = b'B'",
    "written through a map by a system call": f"""{MAP}
open('/tmp/b', 'wb').write(b'B')
open('/tmp/b', 'rb', buffering=0).readinto(memoryview(memory)[:1])
""",
    "time put back": """
import os
old = os.stat('a')
open('a', 'r+b').write(b'B')
os.utime('a', ns=(old.st_atime_ns, old.st_mtime_ns))
""",
    "replaced by a file of the same size and time": """
import os
old = os.stat('a')
open('new', 'wb').write(b'B' + open('a', 'rb').read()[1:])
os.utime('new', ns=(old.st_atime_ns, old.st_mtime_ns))
os.rename('new', 'a')
""",
}
"""Changes of a file that leave its size, and most of them its times."""

A_FILE = {"command": "head -c 5000 /dev/zero | tr '\\0' A > a"}

TWIN = f"{MAP}print(memory[0]); open('b', 'w').close(); os.remove('b')"


@pytest.mark.parametrize(
    ("runtime", "disk_mb"),
    [
        pytest.param(None, None, id="memory"),
        pytest.param(None, 64, id="disk"),
        pytest.param(
            "runsc", None, id="runsc-memory", marks=[pytest.mark.needs("runsc"), pytest.mark.soak]
        ),
        pytest.param("runsc", 64, id="runsc-disk", marks=pytest.mark.needs("runsc")),
    ],
)
async def test_attack_change_without_a_trace_is_asked_about(
    home: Path, runtime: str | None, disk_mb: int | None
) -> None:
    """Twin: a program that maps the file and only reads it changes nothing, so nobody is asked."""
    images = LanguageImages(python="python", shell="python")
    settings = ContainerSettings(pool_min=0, runtime=runtime, images=images)
    async with running(Config(home=home, container=settings)) as engine:
        made = await engine.sessions.create(
            engine.owner, image="python", durable=True, disk_mb=disk_mb
        )
        # Not by Python: on a disk, variables of the session would have all contents compared.
        await engine.call("run_shell", A_FILE, session_id=made.id)
        options = {"session_id": made.id, "preview": True}
        for how, code in UNSEEN.items():
            await tree(engine, made.id)  # by now, nothing has changed just before
            command = {"command": f'python3 - <<"END"\n{code}\nEND'}
            async with Trial(engine, "run_shell", command, options) as tried:
                assert tried.approval.preview is not None
                assert [one["path"] for one in tried.approval.preview["changed"]] == ["a"], how
                assert (await tried.decide(NO)).error is not None
            assert (await tree(engine, made.id)).startswith(".\n./a:AAAA"), how
        command = {"command": f'python3 - <<"END"\n{TWIN}\nEND'}
        answer = await engine.call("run_shell", command, **options)
        assert answer.success, answer.error
        assert answer.data["stdout"] == f"{ord('A')}\n"


SWAPPED = """
import fcntl, os, struct
open('new', 'wb').write(b'B' * 5000)
a, new = (os.open(name, os.O_RDWR) for name in ('a', 'new'))
for file in (a, new):
    os.fsync(file)
moved = struct.pack('=IIQQQQ', 0, a, 0, 0, 4, 0)
try:
    fcntl.ioctl(new, 0xC028660F, moved)  # EXT4_IOC_MOVE_EXT
except OSError as error:
    print(error.strerror)
os.posix_fadvise(a, 0, 0, os.POSIX_FADV_DONTNEED)
os.remove('new')
"""


async def test_attack_blocks_of_two_files_on_a_disk_are_not_exchanged(home: Path) -> None:
    """Which changes what is in a file, without a trace in its times. Nobody was asked."""
    images = LanguageImages(python="python", shell="python")
    settings = ContainerSettings(pool_min=0, images=images)
    async with running(Config(home=home, container=settings)) as engine:
        made = await engine.sessions.create(engine.owner, image="python", durable=True, disk_mb=64)
        await engine.call("run_shell", A_FILE, session_id=made.id)
        before = await tree(engine, made.id)
        command = {"command": f'python3 - <<"END"\n{SWAPPED}\nEND'}
        answer = await engine.call("run_shell", command, session_id=made.id, preview=True)
        assert answer.success, answer.error
        assert answer.data["stdout"] == "Operation not permitted\n"
        assert await tree(engine, made.id) == before


async def test_request_of_a_trial_is_sent_with_the_secret_of_its_program(
    engine: Engine, session: str, upstream: Upstream
) -> None:
    """The approver sees the placeholder, and the next call has another one."""
    code = f"""
import os, urllib.error, urllib.request
login = {{"Authorization": "Bearer " + os.environ["API_KEY"]}}
url = "http://{HOST}:{upstream.port}/one"
try: urllib.request.urlopen(urllib.request.Request(url, b"1", login))
except urllib.error.HTTPError as error: print(error.code)
"""
    async with trial(engine, session, code, network=[HOST]) as tried:
        assert tried.approval.preview is not None
        (held,) = tried.approval.preview["requests"]
        assert held["headers"]["authorization"].startswith("Bearer fhs_")
        assert upstream.requests == []
        answer = await tried.decide(YES)
    assert answer.success, answer.error
    (sent,) = upstream.requests
    assert (sent.body, sent.headers["authorization"]) == (b"1", f"Bearer {SECRET}")


CANNOT_BE_UNDONE = (
    "import os; os.symlink('/etc/passwd', 'link'); open('a', 'w').write('b')",
    "import os; os.mkfifo('pipe'); os.mkdir('d'); os.symlink('..', 'd/up')",
    "open('a', 'w').write('b'); os = __import__('os'); os.mkdir('d'); os.chmod('d', 0); 1 / 0",
    "open('a', 'w').write('b'); import os; os.kill(os.getpid(), 9)",
    "import os\nfor n in range(30_000): os.mkdir(f'd{n}')",
    "open('.fumehood-upload-x', 'w').write('b')",
    "open(b'\\xff', 'w').write('b'); open('a', 'w').write('b')",
    "import os\nfor n in range(70): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('b')",
    "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
)


async def test_attack_program_that_cannot_be_undone_leaves_nothing(
    engine: Engine, session: str
) -> None:
    """Twin: what can be undone, above."""
    await value(engine, session, "x = 1; open('a', 'w').write('a')")
    before = await tree(engine, session)
    for code in CANNOT_BE_UNDONE:
        answer = await engine.call(
            "run_python", {"code": code}, session_id=session, preview=True, timeout_seconds=60
        )
        assert answer.error is not None, code
        assert not (await engine.approvals.list(ApprovalQuery(state="pending"))).items
        assert await tree(engine, session) == before, code


async def test_session_has_only_so_many_trials_that_wait(engine: Engine, session: str) -> None:
    options = {"session_id": session, "preview": True}
    calls = [
        asyncio.ensure_future(engine.call("run_shell", {"command": f"echo > f{n}"}, **options))
        for n in range(5)
    ]
    done, others = await asyncio.wait(calls, return_when="FIRST_COMPLETED", timeout=600)
    (refused,) = done
    error = refused.result().error
    assert error is not None
    assert error.code == "RATE_LIMITED"
    for one in others:
        one.cancel()
    await asyncio.wait(others)
    assert await tree(engine, session) == ".\n"
    with anyio.fail_after(DEADLINE_S):
        while (await engine.approvals.list(ApprovalQuery(state="pending"))).items:
            await anyio.sleep(0.02)
    async with Trial(engine, "run_shell", {"command": "echo > g"}, options) as tried:
        assert (await tried.decide(YES)).success


async def test_what_cannot_be_tried_is_refused(engine: Engine, session: str) -> None:
    plain = await engine.sessions.create(engine.owner, image="python")
    for tool, arguments, of in (
        ("run_python", {"code": "0"}, None),
        ("run_python", {"code": "0"}, plain.id),
        ("run_python", {"code": "0", "tools": ["calculator"]}, session),
        ("calculator", {"expression": "1"}, None),
        ("write_file", {"path": "a", "content": "b"}, session),
    ):
        answer = await engine.call(tool, arguments, session_id=of, preview=True)
        assert answer.error is not None
        assert (answer.error.code, answer.error.fields) == ("INVALID_PARAMS", ("options.preview",))
    await engine.sessions.end(engine.owner, plain.id)
    await engine.call("run_shell", {"command": "ln -s a b"}, session_id=session)
    answer = await engine.call("run_shell", {"command": "ls"}, session_id=session, preview=True)
    assert answer.error is not None
    assert "links" in answer.error.message


async def test_rule_that_asks_for_a_preview_lets_programs_run_as_trials(home: Path) -> None:
    """Twin: without it, or where a call cannot be tried, the program does not run before the yes."""
    policy = home / "policy.toml"
    policy.write_text("""
[[rules]]
id = "look"
decision = "ask"
tools = ["run_shell"]
preview = true
""")
    policy.chmod(0o600)
    config = Config(
        home=home, policy_file=policy,
        container=ContainerSettings(pool_min=0, images=LanguageImages(shell="python")),
    )  # fmt: skip
    async with running(config) as engine:
        for is_durable in (True, False):
            made = await engine.sessions.create(engine.owner, image="python", durable=is_durable)
            command = {"command": "echo a > a"}
            options = {"session_id": made.id, "wait_for_approval": True}
            async with Trial(engine, "run_shell", command, options) as asked:
                preview = asked.approval.preview
                assert (preview is not None) is is_durable
                assert asked.approval.rule == "look"
                assert (await asked.decide(YES)).success
            if is_durable:  # nothing to decide on
                read = await engine.call("run_shell", {"command": "cat a"}, **options)
                assert read.data["stdout"] == "a\n"


@pytest.mark.needs("runsc")
async def test_effect_is_held_on_gvisor_too(home: Path) -> None:
    config = Config(
        home=home,
        container=ContainerSettings(
            pool_min=0, runtime="runsc", images=LanguageImages(python="python")
        ),
    )
    async with running(config) as engine:
        made = await engine.sessions.create(engine.owner, image="python", durable=True)
        await value(engine, made.id, "x = 1; open('a', 'w').write('a')")
        code = "x = 2; open('a', 'w').write('b'); open('c', 'w').write('c')"
        for decision, files, left in ((NO, "./a:a\n", 1), (YES, "./a:b\n./c:c\n", 2)):
            async with trial(engine, made.id, code) as tried:
                assert (await tree(engine, made.id)) == ".\n./a:a\n"
                await tried.decide(decision)
            assert (await tree(engine, made.id)) == f".\n{files}"
            assert await value(engine, made.id, "x") == left
