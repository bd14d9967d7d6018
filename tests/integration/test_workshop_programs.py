"""Programs in the node and python-data images: shell, JavaScript, tables and figures."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conftest import ready_image
from fumehood.core.errors import EndedBy
from fumehood.core.limits import MB
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S7")]

PNG = b"\x89PNG\r\n\x1a\n"
RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(
    scope="module", params=["runc", pytest.param("direct", marks=pytest.mark.needs("direct"))]
)
async def shared_node(request: pytest.FixtureRequest) -> AsyncIterator[OneContainer]:
    """One shared container, because a start under gVisor takes longer than most tests."""
    async with one_container(ready_image("node"), runtime=request.param) as box:
        yield box


@pytest.fixture
async def node(shared_node: OneContainer) -> AsyncIterator[OneContainer]:
    """A container with an empty workspace, which must survive the test."""
    yield shared_node
    await shared_node.shell("chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -delete")
    assert shared_node.ended is None


@pytest.fixture(scope="module")
async def shared_data() -> AsyncIterator[OneContainer]:
    async with one_container(ready_image("python-data")) as box:
        yield box


@pytest.fixture
async def data(shared_data: OneContainer) -> AsyncIterator[OneContainer]:
    """A container without earlier variables and figures, which must survive the test."""
    yield shared_data
    await shared_data.shell("kill -9 -1")
    await shared_data.shell("find . -mindepth 1 -delete")
    assert shared_data.ended is None


on_both = pytest.mark.parametrize("shared_node", RUNTIMES, indirect=True)
"""For what depends on the kernel that programs see."""


# -- shell ------------------------------------------------------------------------------


@on_both
async def test_shell_command_runs_in_bash_with_stdin_streams_and_exit_status(
    node: OneContainer,
) -> None:
    ran = await node.shell("yes | head -2; echo $0; cat; echo oops >&2; exit 7", stdin="typed\n")
    assert (ran.stdout, ran.stderr) == ("y\ny\nbash\ntyped\n", "oops\n")
    assert (ran.ended_by, ran.exit_code) == (EndedBy.EXIT, 7)


@on_both
async def test_shell_command_may_exceed_the_argument_size_limit(node: OneContainer) -> None:
    ran = await node.shell(f"# {'x' * 200_000}\necho done")
    assert ran.stdout == "done\n"


async def test_shell_command_without_stdin_reads_eof_and_has_no_tty(
    node: OneContainer,
) -> None:
    ran = await node.shell("cat; read answer; echo status $?; read key < /dev/tty || echo none")
    assert ran.stdout == "status 1\nnone\n"


@on_both
async def test_shell_command_inherits_no_guest_file_descriptor(node: OneContainer) -> None:
    ran = await node.shell("for n in 3 4 5 6 7 8 9; do readlink /proc/self/fd/$n; done; echo end")
    assert ran.stdout == "end\n"


SURROUNDINGS = {
    "stdin": None,
    "stdin_base64": "AP8=",
    "files": [{"path": "d/a", "content": "a"}],
    "env": [{"name": "A", "value": "x y"}],
    "working_directory": "d",
}


@on_both
@pytest.mark.parametrize(
    ("program", "source"),
    [
        ("shell", {"command": None, "argv": ["sh", "-c", 'pwd; echo "$A"; wc -c']}),
        (
            "python",
            {
                "code": "import os, sys; print(os.getcwd(), os.environ['A'], len(sys.stdin.buffer.read()), sep='\\n')"
            },
        ),
        (
            "javascript",
            {
                "code": "console.log([process.cwd(), process.env.A, require('fs').readFileSync(0).length].join('\\n'))"
            },
        ),
    ],
    ids=["shell", "python", "javascript"],
)
async def test_environment_directory_and_stdin_apply_on_every_runtime(
    node: OneContainer, program: str, source: dict[str, object]
) -> None:
    ran = await node.run(program, {**source, **SURROUNDINGS})
    assert (ran.ended_by, ran.stdout) == (EndedBy.OK, "/workspace/d\nx y\n2\n"), ran
    refused = await node.run(program, {**source, **SURROUNDINGS, "working_directory": "none"})
    assert refused.claimed_kind == "invalid"


# -- JavaScript -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value", "shown"),
    [
        ("6 * 7", 42, "42"),
        ("const a = [1, {b: 2}]; a", [1, {"b": 2}], "[ 1, { b: 2 } ]"),
        ("Promise.resolve('x')", "x", "'x'"),
        ("10n ** 20n", None, "100000000000000000000n"),
        ("undefined", None, None),
        ("({f() {}})", None, "{ f: [Function: f] }"),
        ("const c = {}; c.c = c; c", None, "<ref *1> { c: [Circular *1] }"),
        ("require('path').join('a', 'b')", "a/b", "'a/b'"),
        ("2 ** 53", None, "9007199254740992"),
    ],
)
async def test_javascript_last_value_is_returned_as_json_and_text(
    node: OneContainer, code: str, value: object, shown: str | None
) -> None:
    ran = await node.javascript(code)
    assert value_of(ran) == value
    assert ran.result["value_repr"] == shown


async def test_javascript_top_level_await_works_and_keeps_line_numbers(node: OneContainer) -> None:
    ran = await node.javascript(
        "const fs = require('fs/promises')\nawait fs.writeFile('o.txt', 'x')\n"
        "console.log(await fs.readFile('o.txt', 'utf8'))\nnull.boom"
    )
    assert ran.stdout == "x\n"
    assert ran.ended_by is EndedBy.EXCEPTION
    assert ran.claimed_error["exception"]["line"] == 4
    assert node.heard.names == ["o.txt"]


@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        ("\nthrow new TypeError('no')", "TypeError", 2),
        ("let x = ;", "SyntaxError", 1),
        ("setTimeout(() => { null.x }, 1)", "TypeError", 1),
        ("Promise.reject(new RangeError('r'))", "RangeError", 1),
        ("throw 'text'", "string", None),
    ],
)
async def test_javascript_exception_reports_its_line_and_no_guest_frames(
    node: OneContainer, code: str, kind: str, line: int | None
) -> None:
    ran = await node.javascript(code)
    assert (ran.ended_by, ran.exit_code) == (EndedBy.EXCEPTION, 1)
    exception = ran.claimed_error["exception"]
    assert (exception["type"], exception["line"]) == (kind, line)
    assert "fumehood" not in ran.stderr
    assert "node:" not in exception["traceback"]


async def test_endless_javascript_loop_is_ended_by_wall_time(node: OneContainer) -> None:
    ran = await node.javascript("while (true) {}", wall_s=1)
    assert ran.ended_by is EndedBy.WALL_TIME
    assert value_of(await node.javascript("1")) == 1  # the twin, in the same container


@on_both
async def test_javascript_heap_exhaustion_is_reported_as_memory(
    node: OneContainer,
) -> None:
    ran = await node.javascript(
        "const l = []; while (true) l.push(new Array(100000).fill(Math.random()))", wall_s=60
    )
    # Where the kernel counts no memory inside (gVisor), Node itself gives up first, and says why.
    gave_up = ran.ended_by is EndedBy.SIGNAL and "heap out of memory" in ran.stderr
    assert ran.ended_by is EndedBy.MEMORY or gave_up


async def test_javascript_progress_and_output_are_streamed(node: OneContainer) -> None:
    await node.javascript("progress(30, 'third'); console.log('a'); progress(500)", live=True)
    assert node.heard.progress == [(30.0, "third"), (100.0, "")]
    assert node.heard.output == [("stdout", "a\n")]


# -- tables and figures ---------------------------------------------------------------------


async def test_small_dataframe_is_returned_as_records_and_text(data: OneContainer) -> None:
    ran = await data.python(
        "import pandas as pd\n"
        "pd.DataFrame({'a': [1, 2], 'when': pd.to_datetime(['2026-01-02', None])}, index=['x', 'y'])"
    )
    assert value_of(ran) == [
        {"index": "x", "a": 1, "when": "2026-01-02T00:00:00"},
        {"index": "y", "a": 2, "when": None},
    ]
    assert ran.result["value_repr"].splitlines()[0].split() == ["a", "when"]


async def test_large_dataframe_is_returned_as_text_only(data: OneContainer) -> None:
    ran = await data.python("import numpy as np, pandas as pd\npd.DataFrame(np.zeros((3000, 3)))")
    assert value_of(ran) is None
    assert "3000 rows" in ran.result["value_repr"]


async def test_dataframe_records_keep_exact_values_and_omit_non_json_cells(
    data: OneContainer,
) -> None:
    ran = await data.python(
        "import pandas as pd\n"
        "pd.DataFrame({'p': [1e-12, 1 / 3, 0.1 + 0.2], 'n': [1, None, 3], 's': ['x', None, 'z'],\n"
        "              'b': [True, False, True]})"
    )
    assert value_of(ran) == [
        {"p": 1e-12, "n": 1.0, "s": "x", "b": True},
        {"p": 1 / 3, "n": None, "s": None, "b": False},
        {"p": 0.1 + 0.2, "n": 3.0, "s": "z", "b": True},
    ]
    for cell in ("float('inf')", "b'x'", "2 ** 60", "object()"):  # nothing that JSON holds
        told = await data.python(f"pd.DataFrame({{'a': [{cell}]}})")
        assert value_of(told) is None
        assert told.result["value_repr"]


async def test_oversized_dataframe_is_noted_in_the_result(data: OneContainer) -> None:
    large = await data.python("import pandas as pd\npd.DataFrame({'a': range(6000)})")
    assert value_of(large) is None
    assert "too large" in large.result["notes"][0]
    small = await data.python("pd.DataFrame({'a': range(60)})")
    assert len(value_of(small)) == 60
    assert small.result is not None
    assert "notes" not in small.result


async def test_numpy_values_are_returned_as_json_numbers(data: OneContainer) -> None:
    assert value_of(await data.python("import numpy as np\nnp.arange(3) * 1.5")) == [0.0, 1.5, 3.0]
    assert value_of(await data.python("np.int64(3)")) == 3
    assert value_of(await data.python("np.float64('nan')")) is None


async def test_open_figures_are_returned_automatically(data: OneContainer) -> None:
    ran = await data.python(
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 3, 2]); plt.show()\n"
        "plt.figure(); plt.plot([2, 1])\n"
        "plt.savefig('mine.png')",
        keep=False,
    )  # fmt: skip
    assert [name for name, _ in data.heard.pictures] == ["figure-1.png", "figure-2.png"]
    assert all(content.startswith(PNG) for _, content in data.heard.pictures)
    assert data.heard.names == ["mine.png"]
    assert ran.stderr == ""
    await data.python("import matplotlib.pyplot as plt", keep=False)  # the twin draws nothing
    assert data.heard.pictures == []


async def test_session_returns_each_figure_once(data: OneContainer) -> None:
    await data.python("import matplotlib.pyplot as plt\nplt.plot([1])")
    assert len(data.heard.pictures) == 1
    await data.python("plt.get_fignums()")
    assert data.heard.pictures == []
    await data.python("plt.plot([2])")
    assert [name for name, _ in data.heard.pictures] == ["figure-1.png"]


async def test_oversized_figure_is_left_out_and_its_size_noted(data: OneContainer) -> None:
    ran = await data.python(
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(100, 100), dpi=100)\nplt.plot([1])\n"
        "plt.figure()\nplt.plot([2])"
    )
    (note,) = ran.result["notes"]
    assert "10000 x 10000 pixels" in note
    assert [name for name, _ in data.heard.pictures] == ["figure-1.png"]
    assert ran.peak_memory_bytes is None or ran.peak_memory_bytes < 300 * MB


async def test_figure_grows_to_its_content_up_to_a_limit(data: OneContainer) -> None:
    await data.python(
        "import matplotlib.pyplot as plt\n"
        "for at in (1.5, 1e4):\n"
        "    figure, axes = plt.subplots(figsize=(2, 2), dpi=100)\n"
        "    axes.text(at, 0.5, 'outside of the figure', transform=axes.transAxes)",
        keep=False,
    )  # fmt: skip
    beside, far = (int.from_bytes(content[16:20], "big") for _, content in data.heard.pictures)
    assert 300 < beside < 600
    assert far == 200


async def test_figures_of_a_failed_program_are_returned(data: OneContainer) -> None:
    failed = await data.python("import matplotlib.pyplot as plt\nplt.plot([1])\n1 / 0", keep=False)
    assert failed.ended_by is EndedBy.EXCEPTION
    assert len(data.heard.pictures) == 1


async def test_figures_over_the_limit_are_noted(data: OneContainer) -> None:
    ran = await data.python(
        "import matplotlib.pyplot as plt\n"
        "plt.rcParams['figure.max_open_warning'] = 0\n"
        "for n in range(23): plt.figure(figsize=(1, 1))\n"
        "None"
    )
    assert len(data.heard.pictures) == 20
    assert len(ran.result["notes"]) == 3
