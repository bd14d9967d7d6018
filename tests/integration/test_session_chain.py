"""A session inside its container: variables pass from process to process, files stay."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from fumehood.core.errors import EndedBy
from fumehood.core.limits import MB
from fumehood.sandbox.images.catalog import Image
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(
    scope="module", params=["runc", pytest.param("direct", marks=pytest.mark.needs("direct"))]
)
async def shared(
    request: pytest.FixtureRequest, python_image: Image
) -> AsyncIterator[OneContainer]:
    """One shared container, because a start under gVisor takes longer than most tests."""
    async with one_container(python_image, runtime=request.param) as box:
        yield box


@pytest.fixture
async def box(shared: OneContainer) -> AsyncIterator[OneContainer]:
    """A container without earlier variables and files, which must survive the test."""
    yield shared
    await shared.shell("kill -9 -1")
    await shared.shell("chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -delete")
    assert shared.ended is None, shared.container.complaint


RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
on_both = pytest.mark.parametrize("shared", RUNTIMES, indirect=True)
"""For what depends on the kernel that programs see."""


@on_both
async def test_variables_functions_and_imports_persist_to_the_next_call(
    box: OneContainer,
) -> None:
    first = await box.python("import math as m\nx = [1]\ndef twice(n): return 2 * n")
    assert first.state == "kept"
    assert value_of(await box.python("x.append(2)\ntwice(m.floor(2.5)), x")) == [4, [1, 2]]
    assert value_of(await box.python("x")) == [1, 2]


async def test_variables_set_before_an_exception_persist(box: OneContainer) -> None:
    failed = await box.python("x = 1\nx = 2\n1 / 0")
    assert (failed.ended_by, failed.state, failed.exit_code) == (EndedBy.EXCEPTION, "kept", 1)
    assert value_of(await box.python("x")) == 2


async def test_traceback_shows_source_lines_of_earlier_calls(box: OneContainer) -> None:
    await box.python("# one\n# two\ndef broken():\n    return undefined_name")
    failed = await box.python("broken()")
    assert 'File "<code 2>", line 1' in failed.stderr
    assert 'File "<code>", line 4' in failed.stderr
    assert "return undefined_name" in failed.stderr


@on_both
@pytest.mark.parametrize(
    ("code", "ended_by", "wall_s"),
    [
        ("x = 'new'\nwhile True: pass", EndedBy.WALL_TIME, 1),
        ("x = 'new'\nimport os\nos._exit(3)", EndedBy.EXIT, 20),
        ("x = 'new'\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", EndedBy.SIGNAL, 20),
        ("x = 'new'\nprint('y' * 3_000_000)", EndedBy.OUTPUT, 20),
    ],
)
async def test_killed_run_rolls_back_variables_and_keeps_files(
    box: OneContainer, code: str, ended_by: EndedBy, wall_s: float
) -> None:
    await box.python("x = 'old'")
    killed = await box.python(f"open('left.txt', 'w').write('here')\n{code}", wall_s=wall_s)
    assert (killed.ended_by, killed.state) == (ended_by, "rolled_back")
    assert box.heard.names == ["left.txt"]
    assert value_of(await box.python("x, open('left.txt').read()")) == ["old", "here"]


@on_both
async def test_session_survives_a_kill_of_its_first_call(box: OneContainer) -> None:
    killed = await box.python("x = 1\nwhile True: pass", wall_s=1)
    assert killed.state == "rolled_back"
    assert value_of(await box.python("'x' in globals()")) is False
    assert value_of(await box.python("x = 2\nx")) == 2


async def test_sys_exit_keeps_the_variables(box: OneContainer) -> None:
    ended = await box.python("import sys\nx = 5\nsys.exit(4)")
    assert (ended.ended_by, ended.exit_code, ended.state) == (EndedBy.EXIT, 4, "kept")
    assert value_of(await box.python("x")) == 5


@on_both
async def test_threads_and_child_processes_end_with_their_call(box: OneContainer) -> None:
    await box.python(
        "import subprocess, threading\n"
        "n = 0\n"
        "def count():\n"
        "    global n\n"
        "    while True: n += 1\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "child = subprocess.Popen(['sleep', '1000'])"
    )
    listed = (
        "import os\n"
        "names = []\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        names.append(open(f'/proc/{pid}/cmdline').read().partition(chr(0))[0])\n"
        "    except OSError:\n"
        "        pass\n"
        "threading.active_count(), [name for name in names if 'sleep' in name]"
    )
    assert value_of(await box.python(listed)) == [1, []]


@on_both
@pytest.mark.parametrize("kind", ["BufferedWriter", "BufferedRandom"])
async def test_file_lock_held_by_a_thread_does_not_deadlock_the_next_call(
    box: OneContainer, kind: str
) -> None:
    """A thread holds the file's lock nearly all the time, so the fork happens while it is held."""
    await box.python(
        "import io, sys, _thread, time\n"
        "class Slow(io.FileIO):\n"
        "    def write(self, data):\n"
        "        time.sleep(0.005)\n"
        "        return super().write(data)\n"
        "open('f', 'w').write('one\\ntwo\\n')\n"
        "beside = open('f', 'r+b')\n"
        "beside.readline()\n"
        f"file = io.{kind}(Slow('slow', 'w+'))\n"
        "def work():\n"
        "    while True:\n"
        "        file.write(b'-')\n"
        "        file.flush()\n"
        "for _ in range(2): _thread.start_new_thread(work, ())\n"
        "time.sleep(0.1)"
    )
    next_call = (
        "file.write(b'!'), file.flush(), beside.readline().decode(), len(sys._current_frames())"
    )
    assert value_of(await box.python(next_call)) == [1, None, "two\n", 1]
    written = await box.python("open('slow').read().strip('-')")
    assert value_of(written) == "!"


@on_both
async def test_call_returns_only_files_it_wrote_or_changed(box: OneContainer) -> None:
    await box.python("open('a', 'w').write('1'); open('b', 'w').write('2')")
    assert box.heard.names == ["a", "b"]
    await anyio.sleep(0.02)  # a tick of the kernel's clock of files
    await box.python("1 + 1")
    assert box.heard.names == []
    await box.python("open('b', 'w').write('3'); import os; os.makedirs('d'); open('d/c', 'w')")
    assert box.heard.names == ["b", "d/c"]
    await anyio.sleep(0.02)
    hooks = "os.makedirs('d/.git/hooks'); open('d/.git/hooks/x', 'w'); open('d/.gitignore', 'w')"
    await box.python(hooks)
    assert box.heard.names == ["d/.gitignore"]


@on_both
async def test_large_variables_are_kept_and_counted_until_memory_is_exceeded(
    box: OneContainer,
) -> None:
    filled = await box.python("hoard = bytearray(300 << 20)\nhoard[::4096] = b'x' * 76800")
    assert filled.state == "kept"
    assert filled.variables_bytes is None or filled.variables_bytes > 290 * MB
    over = await box.python("more = bytearray(400 << 20)\nmore[::4096] = b'x' * 102400")
    assert (over.ended_by, over.state) in (
        (EndedBy.MEMORY, "rolled_back"),
        (EndedBy.MEMORY, "kept"),  # where Python itself was refused the memory, nothing was killed
    )
    assert value_of(await box.python("len(hoard), 'more' in globals()")) == [300 << 20, False]


async def test_input_files_stdin_and_progress_belong_to_their_call(box: OneContainer) -> None:
    await box.python("x = open('in.txt').read()", files=[{"path": "in.txt", "content": "first"}])
    ran = await box.python(
        "import sys\nprogress(10, 'half')\nprint(x, open('in.txt').read(), repr(sys.stdin.read()))",
        files=[{"path": "in.txt", "content": "second"}], live=True,
    )  # fmt: skip
    assert ran.stdout == "first second ''\n"
    assert box.heard.progress == [(10.0, "half")]
    assert "".join(text for _, text in box.heard.output) == ran.stdout


async def test_excess_progress_reports_do_not_block_the_program(box: OneContainer) -> None:
    """After a limit the supervisor stops reading them."""
    many = "for n in range(60_000): progress(n / 600, 'word ' * 10)\n'done'"
    assert value_of(await box.python(many, wall_s=15)) == "done"
    await box.python("progress(50, 'of the next call')", live=True)
    assert box.heard.progress == [(50.0, "of the next call")]


THREADED = """
import threading, time
x = 'new'
threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
"""
LISTING = {"do": "list", "path": "", "recursive": False, "most": 1}


@on_both
async def test_trial_leaves_the_variables_as_they_were_until_they_are_put_in(
    box: OneContainer,
) -> None:
    await box.python("x = ['old']\ndef f(): return x")
    tried = await box.python("x.append('new'); y = 1; f()", trial=("hold", "t1"))
    assert (value_of(tried), tried.state) == (["old", "new"], "kept")
    assert value_of(await box.shell("true") and await box.python("1", trial=("hold", "t2"))) == 1
    ending = await box.run("files", LISTING, trial=("adopt", "t1"))
    assert ending.state == "kept"
    assert value_of(await box.python("f(), y")) == [["old", "new"], 1]
    assert (await box.run("files", LISTING, trial=("adopt", "t2"))).state == "reset"
    assert value_of(await box.python("x.append('more'); f()")) == ["old", "new", "more"]


async def test_trial_in_a_new_session_begins_without_variables(box: OneContainer) -> None:
    tried = await box.python("x = 1", trial=("hold", "t1"))
    assert tried.state == "kept"
    assert (await box.python("x", trial=("hold", "t2"))).ended_by is EndedBy.EXCEPTION
    assert (await box.run("files", LISTING, trial=("adopt", "t1"))).state == "kept"
    assert value_of(await box.python("x")) == 1


@on_both
@pytest.mark.parametrize(
    ("code", "between", "action"),
    [
        ("x = 'new'", "x = 'other'", "adopt"),  # it began with variables that are gone
        ("x = 'new'", None, "drop"),
        ("x = 'new'; import os; os._exit(0)", None, "adopt"),  # none are left of it
        (THREADED, None, "adopt"),
    ],
    ids=["changed", "dropped", "gone", "with a thread"],
)  # fmt: skip
async def test_variables_of_a_trial_that_cannot_be_put_in_change_nothing(
    box: OneContainer, code: str, between: str | None, action: str
) -> None:
    await box.python("x = 'old'")
    state = (await box.python(code, trial=("hold", "t1"))).state
    assert state == ("kept" if "import" not in code else "rolled_back")
    assert value_of(await box.python("x", trial=("hold", "t2"))) == "old"
    if between is not None:
        await box.python(between)
    state = (await box.run("files", LISTING, trial=(action, "t1"))).state
    assert state == ("reset" if action == "adopt" else None)
    assert value_of(await box.python("x")) == ("old" if between is None else "other")


@on_both
async def test_attack_program_of_a_trial_acts_after_it(box: OneContainer) -> None:
    """It waits for signals, and for its child. Until the trial is over it can: gVisor sends some."""
    await box.python("x = 'old'")
    acts = """
import atexit, os, signal
def act(*_): open('acted', 'w').write('')
for one in (signal.SIGCONT, signal.SIGTERM, signal.SIGALRM): signal.signal(one, act)
signal.setitimer(signal.ITIMER_REAL, 0.3)
if not os.fork():
    import time
    time.sleep(1); act(); os._exit(0)
"""
    tried = await box.python(acts, trial=("hold", "t1"))
    assert tried.ended_by is EndedBy.OK, tried
    await box.shell("rm -f acted")
    await anyio.sleep(1.5)
    assert value_of(await box.python("import os; os.path.exists('acted')")) is False
