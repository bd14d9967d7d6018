"""The two zygotes (thin and preloaded) of an image: programs behave the same under both."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conftest import ready_image
from fumehood.core.errors import EndedBy
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S3", "S6", "S7")]

RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
FAT = "# import pandas\n"
"""Prefix that makes a program run in the preloaded zygote."""

ARE_LOADED = "import sys\n'pandas' in vars(sys)['mod' + 'ules']"
HIDDEN = "import code\nhidden = code.InteractiveInterpreter(globals()).runsource\n"
"""Defines an import that the scan of the program's text does not detect."""

STATE = """\
import json, os, resource, sys, threading
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Threads",
         "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
{
    "status": {name: status.get(name, "").strip() for name in names},
    "limits": [resource.getrlimit(n) for n in
               (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE,
                resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)],
    "environment": dict(os.environ),
    "path": sys.path,
    "argv": sys.argv,
    "at": os.getcwd(),
    "open": sorted(os.listdir("/proc/self/fd")),
    "umask": os.umask(0o22),
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "names": sorted(globals()),
    "streams": [(s.encoding, s.errors, s.line_buffering, s.fileno()) for s in
                (sys.stdin, sys.stdout, sys.stderr)],
    "score": open("/proc/self/oom_score_adj").read(),
}
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=RUNTIMES)
async def shared_data(request: pytest.FixtureRequest) -> AsyncIterator[OneContainer]:
    async with one_container(ready_image("python-data"), runtime=request.param) as box:
        yield box


@pytest.fixture
async def data(shared_data: OneContainer) -> AsyncIterator[OneContainer]:
    """On both runtimes, unless a test does not depend on the kernel that programs see."""
    yield shared_data
    await shared_data.shell("kill -9 -1")
    await shared_data.shell("find . -mindepth 1 -delete")
    assert shared_data.ended is None


only_runc = pytest.mark.parametrize("shared_data", ["runc"], indirect=True)


async def stateless(box: OneContainer, code: str) -> object:
    ran = await box.python(code, keep=False)
    assert ran.ended_by is EndedBy.OK, (ran.stderr, ran.claimed_error)
    return value_of(ran)


@only_runc
async def test_modules_are_preloaded_only_for_programs_that_mention_them(
    data: OneContainer,
) -> None:
    assert await stateless(data, ARE_LOADED) is False
    assert await stateless(data, FAT + ARE_LOADED) is True


async def test_process_state_is_equal_in_both_zygotes(
    data: OneContainer,
) -> None:
    fat = await stateless(data, FAT + STATE)  # first: then both zygotes have loaded what they load
    assert await stateless(data, STATE) == fat


@only_runc
@pytest.mark.parametrize(
    "code", ["1 / 0", "import nothing_there", "def f(:", "raise SystemExit('bye')"]
)
async def test_errors_are_equal_in_both_zygotes(data: OneContainer, code: str) -> None:
    thin = await data.python(f"# nothing to see\n{code}", keep=False)
    fat = await data.python(f"{FAT}{code}", keep=False)
    assert (thin.ended_by, thin.exit_code, thin.stderr) == (fat.ended_by, fat.exit_code, fat.stderr)
    assert thin.claimed_error == fat.claimed_error


@only_runc
async def test_undetected_import_gets_the_same_module_configuration(
    data: OneContainer,
) -> None:
    shown = "(pd.get_option('display.width'), pd.get_option('display.max_columns'), \
             mpl.get_configdir(), mpl.get_cachedir(), mpl.get_backend().lower())"
    hidden = await stateless(
        data, f"{HIDDEN}hidden('imp' 'ort pandas as pd, matplotlib as mpl')\n{shown}"
    )
    assert hidden == await stateless(data, f"import pandas as pd, matplotlib as mpl\n{shown}")


@only_runc
async def test_figure_of_an_undetected_import_is_returned(data: OneContainer) -> None:
    await data.python(
        f"{HIDDEN}hidden('from matplot' 'lib import pyplot as p')\np.plot([1, 2])\np.show()",
        keep=False,
    )
    assert [name for name, _ in data.heard.pictures] == ["figure-1.png"]
    assert data.heard.names == []
    assert data.ended is None


async def test_session_started_in_the_thin_zygote_keeps_variables_after_importing_modules(
    data: OneContainer,
) -> None:
    await data.python("rows = [3, 4]")
    assert value_of(await data.python("rows.append(5)\nlen(rows)")) == 3
    third = await data.python("import pandas as pd\ntable = pd.DataFrame({'n': rows})\nrows")
    assert (value_of(third), third.state) == ([3, 4, 5], "kept")
    assert value_of(await data.python("int(table.n.sum())")) == 12
    killed = await data.python("import os\ntable = None\nos._exit(1)")
    assert killed.state == "rolled_back"
    assert value_of(await data.python("int(table.n.sum()), rows")) == [12, [3, 4, 5]]


@only_runc
async def test_forks_of_one_zygote_draw_different_random_numbers(data: OneContainer) -> None:
    code = "import random, os\n[random.random(), os.fork() and os.wait()[1]]"
    seen = {str(await stateless(data, code)) for _ in range(4)}
    assert len(seen) == 4


@only_runc
async def test_program_that_forks_runs_the_at_fork_hooks_of_its_modules(data: OneContainer) -> None:
    """A zygote's own forks skip these hooks; here `random` must be reseeded in the child."""
    code = """\
import os, random
readable, writable = os.pipe()
if os.fork() == 0:
    os.write(writable, repr(random.random()).encode())
    os._exit(0)
os.wait()
os.read(readable, 100).decode() == repr(random.random())
"""
    assert await stateless(data, code) is False
