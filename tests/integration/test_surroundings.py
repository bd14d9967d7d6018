"""A program's arguments, environment, working directory and binary standard input."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Daemon
from support.http import Answer
from support.workshop import Session, workshop

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S7")]

BYTES = base64.b64encode(bytes(range(256))).decode()
FILES = [{"path": "d/e/a.txt", "content": "a"}]
WORDS = ["a b", "$HOME", "-x", "", "it's", "ä\n"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with workshop("python", "node", "python-data") as running:
        yield running


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    made = Session(daemon, image="python", memory_mb=128)
    yield made
    made.end()


def env(**variables: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def once(daemon: Daemon, tool: str, **arguments: Any) -> Answer:
    """A call outside a session."""
    with contextlib.closing(daemon.client()) as http:
        return http.call(tool, arguments)


def data(answer: Answer) -> Any:
    assert answer.status == 200, answer.body["error"]
    return answer.body["data"]


def test_program_with_arguments_runs_without_a_shell(session: Session) -> None:
    ran = data(session.call("run_shell", argv=["printf", "<%s>", *WORDS]))
    assert ran["stdout"] == "".join(f"<{word}>" for word in WORDS)
    assert session.call("run_shell", argv=["sh", "-c", "exit 7"]).body["error"]["details"][
        "exit_code"
    ] == 7  # fmt: skip
    missing = session.call("run_shell", argv=["no-such-program"])
    assert missing.body["error"]["details"]["exit_code"] == 127


def test_python_gets_argv_environment_and_directory_for_one_call_only(session: Session) -> None:
    """The session's next call is unaffected by them."""
    shows = "[sys.argv[1:], os.getcwd(), os.getenv('A'), os.getenv('USER')]"
    before = data(session.call("run_python", code=f"import os, sys; n = 1; {shows}", files=FILES))
    inside = data(
        session.call(
            "run_python", code=f"{shows} + [len(sys.stdin.buffer.read())]", argv=WORDS,
            env=env(A="x", USER="y"), working_directory="d", stdin_base64=BYTES,
        )
    )  # fmt: skip
    after = data(session.call("run_python", code=f"n; {shows}"))
    assert before["value"] == after["value"] == [[], "/workspace", None, "sandbox"]
    assert inside["value"] == [WORDS, "/workspace/d", "x", "y", 256]
    assert after["session"]["state"] == "kept"


def test_return_files_false_returns_no_files_but_keeps_them_in_the_session(
    session: Session, daemon: Daemon
) -> None:
    writes = {"command": "echo x > f; echo y > g"}
    assert data(session.call("run_shell", **writes, return_files=False))["files"] == []
    time.sleep(0.02)  # a tick of the kernel's clock of files (docs/limitations/sessions.md)
    assert session.shell("cat f; echo z > h")["files"][0]["filename"] == "h"
    once_only = once(
        daemon, "run_javascript", code="require('fs').writeFileSync('f', 'x')", return_files=False
    )
    assert data(once_only)["files"] == []
    drawn = "open('f', 'w').write('x'); import matplotlib.pyplot as p; p.plot([1, 2]); p.show()"
    made = Session(daemon, image="python-data")
    ran = data(made.call("run_python", code=drawn, return_files=False))
    assert (ran["files"], len(ran["images"])) == ([], 1)
    made.end()


def test_directory_and_environment_changed_by_a_program_persist_in_the_session(
    session: Session,
) -> None:
    session.python("import os; os.mkdir('d'); os.chdir('d'); os.environ['A'] = 'x'")
    data(session.call("run_python", code="1", working_directory="d", env=env(A="y", B="z")))
    shown = session.python("os.getcwd(), os.environ.get('A'), os.environ.get('B')")
    assert shown["value"] == ["/workspace/d", "x", None]


def test_javascript_gets_argv_environment_directory_and_stdin(daemon: Daemon) -> None:
    code = (
        "[process.argv.slice(2), process.cwd(), process.env.A, process.execArgv.join(), "
        "require('fs').readFileSync(0).length]"
    )
    ran = data(
        once(
            daemon, "run_javascript", code=code, argv=WORDS, files=FILES,
            env=env(A="x", NODE_OPTIONS="--no-such-option"), working_directory="d/e",
            stdin_base64=BYTES,
        )
    )  # fmt: skip
    words, directory, variable, _, size = ran["value"]
    assert (words, directory, variable, size) == (WORDS, "/workspace/d/e", "x", 256)


def test_symlink_as_working_directory_is_refused(session: Session) -> None:
    session.shell("ln -s /etc away; mkdir real; ln -s real near")
    for tool, program in (("run_shell", {"command": "pwd"}), ("run_python", {"code": "1"})):
        for place in ("away", "near"):
            refused = session.call(tool, **program, working_directory=place)
            assert refused.code == "INVALID_PARAMS", refused.body
            assert refused.body["error"]["fields"] == ["working_directory"]
        assert data(session.call(tool, **program, working_directory="real"))["exit_code"] == 0


def test_hostile_environment_variables_affect_only_their_own_program(session: Session) -> None:
    """The guest ignores it: limits, endings, files and the next call work as usual."""
    for variables in (
        {"LD_PRELOAD": "/workspace/none.so"},
        {"PATH": "/none", "BASH_ENV": "/none", "PYTHONPATH": "/none", "HOME": "/none"},
        {"TMPDIR": "/none", "LD_LIBRARY_PATH": "/workspace", "PYTHONHASHSEED": "no"},
    ):
        given, name = env(**variables), next(iter(variables))
        writes = f"builtin echo hi > {name}; builtin exit 0"
        ran = data(session.call("run_shell", command=writes, env=given))
        assert [file["filename"] for file in ran["files"]] == [name]
        endless = {"command": "builtin : ; while builtin true; do builtin :; done", "env": given}
        late = session.http.call("run_shell", endless, session_id=session.id, timeout_seconds=0.5)
        assert late.code == "TIMEOUT"
        assert session.python("6 * 7")["value"] == 42
        assert session.shell(f"cat {name}; echo $LD_PRELOAD$BASH_ENV")["stdout"] == "hi\n\n"


def test_program_awaits_at_its_top_level_and_keeps_its_variables(session: Session) -> None:
    """Each call has an event loop of its own; a call that is stopped changes no variable."""
    first = "import asyncio\nx = await asyncio.sleep(0, 41)\nlock = asyncio.Lock()\nx"
    assert data(session.call("run_python", code=first))["value"] == 41
    second = "x += 1\nasync with lock:\n    y = await asyncio.gather(asyncio.sleep(0, x))\ny"
    assert data(session.call("run_python", code=second))["value"] == [42]
    stopped = session.call("run_python", code="x = 0\nexit(await asyncio.sleep(0, 3))")
    assert stopped.body["error"]["details"]["exit_code"] == 3
    failed = session.call("run_python", code="\n\nawait asyncio.wait_for(lock.gone(), 1)")
    assert failed.body["error"]["details"]["exception"]["line"] == 3
    killed = session.call(
        "run_python", code="x = 7\nimport os\nawait asyncio.sleep(0)\nos.kill(os.getpid(), 9)"
    )
    assert killed.code == "EXECUTION_ERROR"
    assert data(session.call("run_python", code="x, y"))["value"] == [0, [42]]


SPAWNING = """
import multiprocessing, os, sys
def work(n):
    return os.path.basename(__file__), n * n
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, range(3)), __file__)
"""
SPAWNED = "[('main.py', 0), ('main.py', 1), ('main.py', 4)] "


@pytest.mark.parametrize(
    ("directory", "place"), [({}, "/workspace"), ({"working_directory": "d"}, "/workspace/d")]
)
def test_processes_of_multiprocessing_load_the_program(
    daemon: Daemon, session: Session, directory: dict[str, str], place: str
) -> None:
    session.shell("mkdir -p d")
    arguments = {"code": SPAWNING, **directory}
    for where in ({}, {"session_id": session.id}):
        files = [{"path": "d/x", "content": ""}] if not where else []
        ran = session.http.call(
            "run_python", {**arguments, "files": files}, timeout_seconds=120, **where
        )
        assert data(ran)["stdout"] == f"{SPAWNED}{place}/main.py\n"
        assert data(ran)["files"] == []


def test_command_with_carriage_returns_gets_a_hint(daemon: Daemon) -> None:
    failed = once(daemon, "run_shell", command="echo a\r\nls\r\n")
    assert "end with CR LF" in failed.body["error"]["message"]


DRAWING = """
import io
{load}
def drawn(text):
    figure = plt.figure(figsize=(2, 1))
    figure.text(0.1, 0.5, text, fontsize=20)
    out = io.BytesIO()
    figure.savefig(out, format="rgba")
    plt.close(figure)
    return out.getvalue()
pairs = ["中国", "繁體", "かな", "カナ", "한국", "قب", "कख"]
plt.title(" ".join(pairs))
plt.ylabel("flamingo \\N{{FLAMINGO}}")
[pair for pair in pairs if drawn(pair[0]) == drawn(pair[1])]
"""
LOADED = "import matplotlib.pyplot as plt"


@pytest.mark.parametrize(
    "load",
    [
        LOADED,
        "plt = __import__('importlib').import_module('matplot' + 'lib.pyplot')",
        f"{LOADED}, seaborn\nseaborn.set_theme()",
        f"{LOADED}\nplt.rcParams['font.family'] = 'serif'",
    ],
    ids=["preloaded", "late", "theme", "serif"],
)
def test_titles_in_other_scripts_are_drawn(daemon: Daemon, load: str) -> None:
    """A character that no font has is a box like every other. The program's last figure is drawn by
    the guest, whose files no warning names.
    """
    session = Session(daemon, image="python-data", memory_mb=512)
    ran = session.http.call(
        "run_python", {"code": DRAWING.format(load=load)}, session_id=session.id,
        timeout_seconds=120,
    )  # fmt: skip
    session.end()
    assert data(ran)["value"] == []
    assert len(data(ran)["images"]) == 1
    (warning,) = data(ran)["stderr"].splitlines()
    assert warning.startswith("UserWarning: Glyph 129449 ")
