"""Module files that a program leaves where processes of the guest might import them.

The guest's zygotes and waiting children are root's, and the program that reads a session's files
answers for the engine. None of them may run a line of what a program wrote. Each planted module
records the user id and the program that imported it, and then gives way to the real one.
"""

from __future__ import annotations

import pytest

from conftest import Daemon, ready_image
from fumehood import Client
from fumehood.sandbox.container.container import LimitsNotEnforced
from fumehood.sandbox.images.catalog import Image
from support.one_container import OneContainer, one_container, value_of
from support.weakened import PATH_WITH_WORKSPACE, WITHOUT_REFUSAL, weak_container

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S5", "S6", "S11")]

on_gvisor = pytest.param("runsc", marks=pytest.mark.needs("runsc"))
"""For what depends on the kernel: who a process is, and what is left of it. Where an interpreter
looks for modules does not.
"""

GIVE_WAY = """
import sys
own, sys.path[:] = sys.path[:], [path for path in sys.path if path != "/workspace"]
del sys.modules[__name__]
sys.modules[__name__] = __import__(__name__)
sys.path[:] = own
"""
"""The module is the real one for those that import it."""

RECORD = (
    "import os\n"
    "os.close(os.open(f'/tmp/imported-{os.getuid()}-{__name__}', os.O_CREAT | os.O_WRONLY))\n"
)

PLANT = f"""
import pathlib, sys
own = ["numpy", "pandas", "matplotlib", "pytz", "dateutil", "PIL", "sitecustomize", "usercustomize"]
for name in {{*own, *sys.stdlib_module_names}} - {{"os", "sys"}}:
    pathlib.Path(name + ".py").write_text({RECORD + GIVE_WAY!r})
pathlib.Path("evil.pth").write_text("import os; os.mkdir('/tmp/imported-pth')")
"""

SEEN = "shopt -s nullglob; cd /tmp; echo imported-*"

LATE_FAT_ZYGOTE = """
from fumehood.guest.container import supervisor
assert supervisor.QUIET_S
supervisor.QUIET_S = 1e6
"""
"""The zygote of the image's modules loads them only when a program needs them."""


async def plant(box: OneContainer, text: str = PLANT) -> None:
    planted = await box.shell(f"exec python3 -I - <<'END'\n{text}\nEND")
    assert planted.exit_code == 0, planted.stderr


async def imported(box: OneContainer) -> list[str]:
    return (await box.shell(SEEN)).stdout.split()


async def test_attack_planted_modules_are_imported_neither_as_root_nor_for_a_file_operation() -> (
    None
):
    image = ready_image("python-data")
    guest = weak_container(LATE_FAT_ZYGOTE)
    async with one_container(image, command=guest) as box:
        await plant(box)
        for _ in range(3):  # each takes a child and orders a spare one
            assert (await box.files(do="list", path="", recursive=True, most=5))["entries"]
        assert await imported(box) == []
        # The twin: to the program its own directory comes first, as in `python main.py`.
        found = await box.python("import pandas, wave\n[pandas.__name__, wave.__name__]")
        assert value_of(found) == ["pandas", "wave"]
        seen = await imported(box)
        assert "imported-10001-wave" in seen
        for _ in range(3):
            await box.python("1")
        seen += await imported(box)
        assert [name for name in seen if not name.startswith("imported-10001-")] == []


async def test_control_zygote_that_searches_the_workspace_runs_planted_modules_as_root() -> None:
    image = ready_image("python-data")
    guest = weak_container(LATE_FAT_ZYGOTE, PATH_WITH_WORKSPACE, WITHOUT_REFUSAL)
    async with one_container(image, command=guest) as box:
        await plant(box)
        await box.python("# import pandas\n1")
        assert "imported-0-matplotlib" in await imported(box)


async def test_zygote_that_searches_a_writable_place_refuses_to_serve(python_image: Image) -> None:
    guest = weak_container(PATH_WITH_WORKSPACE)
    with pytest.raises(LimitsNotEnforced, match="/workspace, which programs can write"):
        async with one_container(python_image, command=guest):
            pass


FORGED = """
import os, socket
ours, theirs = socket.socketpair()
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
    end.connect("\\0fumehood-takeover")
    socket.send_fds(end, [b"99"], [theirs.fileno()] * 3)
os.close(os.open(f"/tmp/imported-{os.getuid()}", os.O_CREAT | os.O_WRONLY))
"""
"""What root has to send to become the host of a session's guest."""

INTRUDER = """
import os, time
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
"""

ANY_PARENT = """
import types
from fumehood.guest.container import takeover
takeover.processes = types.SimpleNamespace(origin_of=lambda pid: 0)
"""


def planting(text: str) -> str:
    return f"open('matplotlib.py', 'w').write({text + GIVE_WAY!r})"


@pytest.mark.parametrize("runtime", ["runc", on_gvisor])
@pytest.mark.parametrize("is_checked", [True, False], ids=["", "control"])
async def test_root_inside_the_container_cannot_become_the_host(
    is_checked: bool, runtime: str
) -> None:
    """As a second wall: the first one has to be taken down for the attack."""
    weak = (LATE_FAT_ZYGOTE, PATH_WITH_WORKSPACE, WITHOUT_REFUSAL)
    guest = weak_container(*weak, *() if is_checked else (ANY_PARENT,))
    image = ready_image("python-data")
    async with one_container(image, runtime=runtime, command=guest) as box:
        box.container.keep(5, 600)
        await plant(box, planting(FORGED))
        await box.python("# import pandas\nx = 1")
        if is_checked:
            assert await imported(box) == ["imported-0"]
            assert value_of(await box.python("x")) == 1
        assert (box.ended is None) is is_checked


@pytest.mark.parametrize("runtime", ["runc", on_gvisor])
@pytest.mark.parametrize("planted", ["", INTRUDER], ids=["twin", "attack"])
async def test_container_in_which_root_left_a_process_is_not_used_again(
    planted: str, runtime: str
) -> None:
    guest = weak_container(LATE_FAT_ZYGOTE, PATH_WITH_WORKSPACE, WITHOUT_REFUSAL)
    image = ready_image("python-data")
    async with one_container(image, runtime=runtime, command=guest) as box:
        box.container.keep(5, 600)
        await plant(box, planting(planted))
        assert (await box.python("# import pandas\n1")).result["value"] == 1
        assert (box.ended is None) is (planted == "")


@pytest.mark.needs("disks")
@pytest.mark.usefixtures("python_image")
def test_attack_planted_modules_on_a_disk_are_not_imported_as_root_after_a_restart(
    shared_daemon: Daemon,
) -> None:
    """There they lie before the first process of the next container starts."""
    with Client(str(shared_daemon.socket)) as client:
        session = client.create_session(disk_mb=16, memory_mb=128).id
        try:
            code = f"import os\nos.chdir('/workspace')\n{PLANT}"
            client.call("run_python", {"code": code}, session_id=session).raise_for_error()
            client.stop_session(session)
            found = client.call("run_python", {"code": "import csv, wave"}, session_id=session)
            assert found.success, found.error
            seen = client.call("run_shell", {"command": SEEN}, session_id=session).data["stdout"]
            assert "imported-10001-wave" in seen.split()
            assert [one for one in seen.split() if not one.startswith("imported-10001-")] == []
        finally:
            client.end_session(session)


async def test_attack_start_files_of_shell_and_node_run_for_no_other_call() -> None:
    """Neither reads a program's files before the program that it is asked to run."""
    record = "require('child_process').execSync('touch /tmp/imported-node')"
    text = f"""
import pathlib
for name in (".bashrc", ".bash_profile", ".profile", ".bash_env", ".inputrc"):
    pathlib.Path(name).write_text("touch /tmp/imported-shell")
for top in ("node_modules", ".node_modules", ".node_libraries"):
    for name in ("fs", "path", "util", "vm", "module", "proxy.js", "undici"):
        pathlib.Path(top, name).mkdir(parents=True)
        pathlib.Path(top, name, "index.js").write_text({record!r})
pathlib.Path("package.json").write_text('{{"type": "module", "imports": {{"fs": "./fs.js"}}}}')
"""
    async with one_container(ready_image("node")) as box:
        await plant(box, text)
        assert value_of(await box.javascript("1 + 1")) == 2
        assert await imported(box) == []
        assert value_of(await box.javascript("require('undici'); 3")) == 3  # the twin
        assert await imported(box) == ["imported-node"]
