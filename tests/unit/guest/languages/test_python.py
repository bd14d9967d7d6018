"""Python programs, each run in a process of its own as the child in a container runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).parents[4] / "engine"

RUNNER = """
import json, os, sys
sys.path.append(sys.argv[1])
from fumehood.guest.languages import python
python.preload()
python.open_standard_streams()
null = os.open(os.devnull, os.O_WRONLY)
kept = os.dup(1)
os.dup2(null, 1)
python.warm_up()
os.dup2(kept, 1)
python.get_ready()
program = python.Program(512 << 20)
exit_code, claim = program.run(sys.argv[2])
program.finish()
with open(sys.argv[3], "w") as out:
    json.dump({"exit_code": exit_code, "claim": claim}, out)
os._exit(0)
"""


@dataclass(frozen=True)
class Ran:
    """What became of one program."""

    exit_code: int
    claim: dict[str, Any]
    stdout: str
    stderr: str

    @property
    def result(self) -> tuple[Any, str | None]:
        return self.claim["result"]["value"], self.claim["result"]["value_repr"]

    @property
    def exception(self) -> dict[str, Any]:
        exception: dict[str, Any] = self.claim["error"]["exception"]
        return exception


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def run(code: str, stdin: str = "") -> Ran:
        out = tmp_path / "claim.json"
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", RUNNER, str(ENGINE), code, str(out)],
            input=stdin, capture_output=True, text=True, timeout=600, check=True, cwd=tmp_path,
        )  # fmt: skip
        told = json.loads(out.read_text())
        return Ran(told["exit_code"], told["claim"], ran.stdout, ran.stderr)

    return run


@pytest.mark.row("S7")
@pytest.mark.parametrize(
    ("code", "value", "shown"),
    [
        ("1 + 1", 2, "2"),
        (
            "[{'a': (1, 'b')}, None, 2.5]",
            [{"a": [1, "b"]}, None, 2.5],
            "[{'a': (1, 'b')}, None, 2.5]",
        ),
        ("x = 3", None, None),
        ("print('x')", None, None),
        ("# nothing", None, None),
        ("2**53", None, "9007199254740992"),
        ("2**53 - 1", 9007199254740991, "9007199254740991"),
        ("{1: 2}", None, "{1: 2}"),
        ("'\\ud800'", None, "'\\ud800'"),
        ("class L(list): pass\nL([1])", None, "[1]"),
        ("class I(int): pass\nI(4)", None, "4"),
    ],
)
def test_last_expression_is_the_value_if_json_can_represent_it(
    run: Any, code: str, value: Any, shown: str | None
) -> None:
    assert run(code).result == (value, shown)


def test_too_deep_or_large_value_is_shown_as_text_only(run: Any) -> None:
    value, shown = run("x = []\nfor _ in range(5000): x = [x]\nx").result
    assert (value, shown) == (None, "<repr() failed: RecursionError>")
    value, shown = run("'z ' * 100_000").result
    assert value is None
    assert shown is not None
    assert len(shown) <= 10_000
    assert shown.endswith("z z '")


def test_repr_that_raises_is_reported_without_failing_the_run(run: Any) -> None:
    ran = run("class A:\n    def __repr__(self):\n        raise ValueError('secret')\nA()")
    assert (ran.exit_code, ran.result) == (0, (None, "<repr() failed: ValueError>"))


def test_a_syntax_error_names_its_line(run: Any) -> None:
    ran = run("x = 1\ny = = 2\n")
    assert (ran.exit_code, ran.exception["type"], ran.exception["line"]) == (1, "SyntaxError", 2)
    assert "languages" not in ran.stderr


def test_exception_with_a_failing_str_is_reported(run: Any) -> None:
    ran = run("class E(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise E")
    assert (ran.exit_code, ran.exception["type"]) == (1, "E")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit('words')", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_exit_code_matches_python(run: Any, code: str, expected: int) -> None:
    assert run(code).exit_code == expected


def test_threads_are_joined_exit_handlers_run_and_streams_are_flushed(run: Any) -> None:
    ran = run(
        "import atexit, sys, threading, time\n"
        "def later():\n    time.sleep(0.05)\n    print('thread')\n"
        "threading.Thread(target=later).start()\n"
        "atexit.register(lambda: print('handler'))\n"
        "sys.stdout.write('main\\n')\nsys.stdout.write('no newline')\n"
    )
    assert ran.stdout == "main\nno newlinethread\nhandler\n"


def test_output_is_flushed_after_each_line(run: Any) -> None:
    """What a killed program has printed would otherwise be lost in its buffer."""
    ran = run("import os\nprint('out')\nos.write(1, b'later')\n")
    assert ran.stdout == "out\nlater"


def test_closing_its_streams_does_not_fail_a_program(run: Any) -> None:
    ran = run("import sys\nprint('x')\nsys.stdout.close()\nsys.stderr = None\n4")
    assert (ran.exit_code, ran.result[0]) == (0, 4)


def test_long_exception_message_is_shortened_in_the_middle(run: Any) -> None:
    ran = run("raise ValueError('a ' * 25_000 + 'z')")
    message = ran.exception["message"]
    assert len(message) <= 2000
    assert message.startswith("a a a")
    assert message.endswith("a z")
    assert len(ran.exception["traceback"]) <= 16_000


@pytest.mark.row("S7")
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("exit()", 0), ("quit()", 0), ("exit(3)", 3), ("def f():\n    quit('why')\nf()", 1)],
)
def test_exit_and_quit_end_a_program_as_in_python(run: Any, code: str, exit_code: int) -> None:
    ran = run(f"print('before')\n{code}\nprint('after')")
    assert (ran.exit_code, ran.stdout, ran.claim) == (exit_code, "before\n", {})
    assert ran.stderr == ("why\n" if exit_code == 1 else "")


DAEMON = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
)
OPEN = "kept = open('out', 'w')\nkept.write('all of it')\n"


@pytest.mark.row("S7", "E7")
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (OPEN, 0),
        (OPEN + "1 / 0", 1),
        (OPEN + "raise SystemExit(3)", 3),
        (OPEN + "class Round: pass\nround = Round()\nround.round, round.kept = round, kept", 0),
        (OPEN + DAEMON, 0),
        ("import sys\nsys.stdout = open('out', 'w')\nprint('all of it', end='')", 0),
        (
            "class Late:\n    def __del__(self): open('out', 'w').write('all of it')\nlate = Late()",
            0,
        ),
    ],
    ids=["left", "failed", "exit", "cycle", "daemon", "stdout", "finalizer"],
)
def test_unclosed_file_is_flushed_at_exit(
    run: Any, tmp_path: Path, code: str, exit_code: int
) -> None:
    assert run(code).exit_code == exit_code
    assert (tmp_path / "out").read_text() == "all of it"


@pytest.mark.row("S7")
def test_daemon_thread_can_use_globals_during_exit(run: Any) -> None:
    ran = run(
        "import threading\nname = 'x'\n"
        "def work():\n    while True:\n        name.upper()\n"
        "threading.Thread(target=work, daemon=True).start()"
    )
    assert (ran.exit_code, ran.stderr) == (0, "")


@pytest.mark.row("S7")
def test_unclosed_zip_archive_is_completed_at_exit(run: Any, tmp_path: Path) -> None:
    run("import zipfile\nz = zipfile.ZipFile('out', 'w')\nz.writestr('name', 'text')")
    with zipfile.ZipFile(tmp_path / "out") as archive:
        assert archive.read("name") == b"text"


AWAITED = """
import asyncio
async def twice(n):
    await asyncio.sleep(0)
    return 2 * n
async def numbers():
    for n in range(3):
        yield n
"""


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("await twice(21)", 42),
        ("x = await twice(21)\nx + 1", 43),
        ("x = await twice(1)\nawait twice(x)", 4),
        ("[await twice(n) async for n in numbers()]", [0, 2, 4]),
        ("found = []\nasync for n in numbers():\n    found.append(n)\nfound", [0, 1, 2]),
        ("async with asyncio.timeout(60):\n    x = await twice(2)\nx", 4),
        ("task = asyncio.create_task(twice(3)) if await twice(0) == 0 else 0\nawait task", 6),
        ("asyncio.run(twice(4))", 8),
        ("x = asyncio.run(twice(4))\nawait twice(x)", 16),
        ("def make():\n    return twice(5)\nasyncio.run(make())", 10),
    ],
)
def test_program_may_await_at_its_top_level(run: Any, code: str, value: Any) -> None:
    ran = run(AWAITED + code)
    assert (ran.exit_code, ran.result[0], ran.stderr) == (0, value, "")


def test_awaiting_program_fails_and_ends_as_another(run: Any) -> None:
    ran = run(AWAITED + "async def fail():\n    await twice(1)\n    1 / 0\n\nawait fail()")
    assert (ran.exception["type"], ran.exception["line"]) == ("ZeroDivisionError", 11)
    assert ran.stderr.startswith(
        'Traceback (most recent call last):\n  File "<code>", line 13, in <module>\n'
    )
    assert run(AWAITED + "await twice(1)\nexit(7)").exit_code == 7
    assert run("def f():\n    await g()").exception["line"] == 2
    ran = run(AWAITED + "async def left():\n    try:\n        await asyncio.sleep(600)\n"
              "    finally:\n        print('cancelled')\n"
              "task = asyncio.create_task(left()) if await twice(0) == 0 else 0\n"
              "await twice(3)")  # fmt: skip
    assert (ran.result[0], ran.stdout) == (6, "cancelled\n")


def test_nothing_ran_if_the_last_line_cannot_be_compiled(run: Any) -> None:
    ran = run("print('ran')\nlambda: (yield from await_)(await x)")
    assert (ran.exception["type"], ran.stdout) == ("SyntaxError", "")


def test_file_of_a_program_is_in_the_working_directory(run: Any, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("found")
    code = "from pathlib import Path\n(Path(__file__).parent / 'data.txt').read_text(), __file__"
    assert run(code).result[0] == ["found", str(tmp_path / "main.py")]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_processes_of_multiprocessing_load_the_program(
    run: Any, method: str, line_end: str
) -> None:
    code = f"""
import multiprocessing as mp, sys
OFFSET = 10
def work(n):
    if n == 3:
        raise ValueError(sys._getframe().f_lineno)
    return n * n + OFFSET
if __name__ == "__main__":
    with mp.get_context({method!r}).Pool(2) as pool:
        print(pool.map(work, range(3)))
        try:
            pool.map(work, [3])
        except ValueError as error:
            print(error)
"""
    ran = run(code.replace("\n", line_end))
    assert (ran.stdout, ran.stderr) == ("[10, 11, 14]\n6\n", "")
