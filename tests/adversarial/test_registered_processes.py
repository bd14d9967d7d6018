"""Attacks by a session's calls and registered processes on each other's lives.

Both have the same user and the same caller, so the harm would be to the promise: after a call
nothing of it is alive, and what is registered can be seen and stopped. What lives is looked at from
outside the container.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import pytest

from fumehood.core.errors import EndedBy
from fumehood.sandbox.images.catalog import Image
from support.one_container import OneContainer, one_container, value_of
from support.processes_beside import (
    ask,
    count_of,
    in_container,
    start,
    state_of,
    until_counted,
    until_printed,
)
from support.weakened import WITHOUT_ANCESTRY, weak_container

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]

HIDDEN = "sleep 4321"
"""The command line of what an attack tries to leave behind."""

BECOME = "os.execv('/bin/sleep', ['sleep', '4321'])\n"


@dataclass(frozen=True)
class Attack:
    name: str
    code: str

    def __str__(self) -> str:
        return self.name


ATTACKS = [
    Attack("child of its own", "import os\nif os.fork() == 0:\n    " + BECOME),
    Attack(
        "double fork with a session of its own",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
        f"{BECOME}    os._exit(0)\n",
    ),
    Attack(
        "child of its parent (CLONE_PARENT)",
        "import ctypes, os, platform\n"
        "clone = 56 if platform.machine() == 'x86_64' else 220\n"
        "if ctypes.CDLL(None).syscall(clone, 0x8000 | 17, 0, 0, 0, 0) == 0:\n    " + BECOME,
    ),
    Attack(
        "hops from process to process",
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    end = time.monotonic() + 20\n"
        "    while time.monotonic() < end:\n"
        "        open('beat', 'w').close()\n"
        "        if os.fork(): os._exit(0)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('beat'): time.sleep(0.01)\n",
    ),
    Attack(
        "hops from sibling to sibling, which a zygote reaps",
        "import ctypes, os, platform, time\n"
        "clone = 56 if platform.machine() == 'x86_64' else 220\n"
        "call = ctypes.CDLL(None).syscall\n"
        "if call(clone, 0x8000 | 17, 0, 0, 0, 0) == 0:\n"
        "    end = time.monotonic() + 20\n"
        "    while time.monotonic() < end:\n"
        "        open('beat', 'w').close()\n"
        "        if call(clone, 0x8000 | 17, 0, 0, 0, 0): os._exit(0)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('beat'): time.sleep(0.01)\n",
    ),
    Attack(
        "has the registered one's name, group and terminal",
        "import ctypes, os\n"
        "pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]\n"
        "def says(pid):\n"
        "    try: return open(f'/proc/{pid}/cmdline').read()\n"
        "    except OSError: return ''\n"
        "(own,) = [pid for pid in pids if says(pid).startswith('sleep\\x001234')]\n"
        "if os.fork() == 0:\n"
        "    try: os.setpgid(0, os.getpgid(own))\n"
        "    except OSError: pass\n"
        "    ctypes.CDLL(None).prctl(15, b'keeper', 0, 0, 0)\n"
        "    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        f"    {BECOME}",
    ),
    Attack(
        "stops and continues registered ones while it hides",
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n        " + BECOME +
        "    while True:\n"
        "        for number in (signal.SIGSTOP, signal.SIGCONT):\n"
        "            for name in os.listdir('/proc'):\n"
        "                if name.isdigit() and int(name) not in (os.getpid(), os.getppid()):\n"
        "                    try: os.kill(int(name), number)\n"
        "                    except OSError: pass\n"
        "time.sleep(0.3)\n",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=RUNTIMES)
async def shared(
    request: pytest.FixtureRequest, python_image: Image
) -> AsyncIterator[OneContainer]:
    async with one_container(python_image, runtime=request.param) as box:
        box.container.keep(1, 600)
        yield box


@pytest.fixture
async def box(shared: OneContainer) -> AsyncIterator[OneContainer]:
    """A session's container with a registered process that has a child. All others are over."""
    await start(shared, "own", "sleep 1234 & echo begun; wait")
    await until_printed(shared, "own", "begun")
    await until_counted(shared, "sleep 1234", 1)
    yield shared
    assert shared.ended is None, shared.container.complaint
    for process in await ask(shared, "list"):
        if process["state"] == "running":
            await ask(shared, "stop", process["name"], grace_s=0)


async def is_beat_over(box: OneContainer) -> bool:
    """Whether no process makes the file `beat` again, as one that hops does all the time."""
    looked = await box.shell("rm -f beat; sleep 0.2; test -e beat && echo yes || echo no")
    assert looked.stdout in ("yes\n", "no\n"), looked
    return looked.stdout == "no\n"


async def test_nothing_of_a_call_is_left_beside_a_registered_process(box: OneContainer) -> None:
    """The registered process and its child are the harmless twin."""
    for attack in ATTACKS:
        await box.python(attack.code, wall_s=5)
        assert box.ended is None, attack
        assert count_of(box, HIDDEN) == 0, attack
        assert await is_beat_over(box), attack
        assert count_of(box, "sleep 1234") == 1, attack
        assert (await state_of(box, "own"))["state"] == "running", attack
    assert value_of(await box.python("2")) == 2
    assert (await ask(box, "stop", "own"))["state"] == "ended"
    assert count_of(box, "sleep 1234") == 0


async def test_nothing_of_a_call_is_left_beside_the_waiting_process_of_a_trial(
    box: OneContainer,
) -> None:
    """That of the trial is the parent of the one that runs the next call, and the kernel reaps its
    children unseen.
    """
    await box.python("x = 1")
    await box.python("x = 2", trial=("hold", "t1"))
    (attack,) = [one for one in ATTACKS if one.name.startswith("hops from sibling")]
    await box.python(attack.code, wall_s=5)
    assert box.ended is None
    assert await is_beat_over(box)
    assert (await state_of(box, "own"))["state"] == "running"
    assert value_of(await box.python("x")) == 1
    await box.shell("true", trial=("drop", "t1"))


@pytest.mark.parametrize("attack", [ATTACKS[0], ATTACKS[1]], ids=str)
async def test_without_the_look_at_ancestors_it_would_be_left(
    python_image: Image, attack: Attack
) -> None:
    """The control: a guest that takes each process for one below a keeper."""
    async with one_container(python_image, command=weak_container(WITHOUT_ANCESTRY)) as box:
        box.container.keep(1, 600)
        await start(box, "own", "sleep 1234")
        await box.shell(f"python3 - <<'END'\n{attack.code}\nEND")
        await until_counted(box, HIDDEN, 1)


async def test_registered_process_that_wakes_the_variables_ends_only_them(
    box: OneContainer,
) -> None:
    await box.python("x = 1")
    await start(box, "waker", "while true; do kill -CONT -1; done")
    await anyio.sleep(1.2)
    assert (await box.python("'x' in globals()")).state in ("reset", "rolled_back", "kept")
    assert box.ended is None
    await ask(box, "stop", "waker", grace_s=0.5)
    await box.python("y = 2")
    assert value_of(await box.python("y")) == 2


CHURN = (
    "while true; do (sleep 0.02 & sleep 0.01) & sleep 0.005; "
    "[ $(jobs -p | wc -l) -gt 20 ] && wait; done"
)


async def test_process_that_forks_for_ever_lets_calls_end_clean(box: OneContainer) -> None:
    """It comes and goes faster than it can be counted. Stopping it leaves nothing."""
    await box.python("x = 1")
    await start(box, "churn", CHURN)
    for attack in (ATTACKS[1], ATTACKS[3], ATTACKS[4]):
        await box.python(attack.code, wall_s=5)
        assert box.ended is None
        assert count_of(box, HIDDEN) == 0
        assert await is_beat_over(box)
    assert (await state_of(box, "churn"))["state"] == "running"
    assert value_of(await box.python("x")) == 1
    assert (await ask(box, "stop", "churn", grace_s=0.2))["state"] == "ended"
    assert count_of(box, "sleep 0.0") == 0


async def test_process_that_an_operator_starts_in_the_container_costs_no_variables(
    box: OneContainer,
) -> None:
    """As `docker exec` does, with a child of its own, while the waiting processes are watched."""
    await box.python("x = 1")
    seen = await anyio.to_thread.run_sync(in_container, box, "sleep 2 & wait; echo over")
    assert seen == "over\n"
    assert box.ended is None
    assert value_of(await box.python("x")) == 1


async def test_fork_bomb_lets_calls_end_and_is_stopped(python_image: Image) -> None:
    """Bounded by the container's processes; the variables need one, and may be lost."""
    bomb = (
        "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)\n"
    )
    async with one_container(python_image) as box:
        box.container.keep(1, 600)
        await ask(box, "start", "bomb", argv=["python3", "-c", bomb])
        await anyio.sleep(0.5)
        ended = await box.shell("echo on", wall_s=10)
        assert box.ended is None
        assert ended.stdout in ("on\n", "")
        assert (await ask(box, "stop", "bomb", grace_s=0.2))["state"] == "ended"
        assert count_of(box, "python3 -c") == 0
        assert value_of(await box.python("2")) == 2


HOGS = "for n in $(seq 45); do (while :; do :; done) & done; echo begun; wait"


@pytest.mark.parametrize("policy", ["SCHED_IDLE", "SCHED_OTHER"], ids=["attack", "twin"])
async def test_call_that_gives_up_its_share_of_the_processor_ends_beside_busy_processes(
    policy: str, python_image: Image
) -> None:
    """A killed process needs a processor to end, and the host waits for that for a minute."""
    async with one_container(python_image) as box:
        box.container.keep(1, 600)
        await start(box, "hogs", HOGS)
        await until_printed(box, "hogs", "begun")
        assert value_of(await box.python("x = 2\nx")) == 2
        give = f"import os\nos.sched_setscheduler(0, os.{policy}, os.sched_param(0))\n"
        ended = await box.python(f"{give}while True: pass", wall_s=1)
        assert (box.ended, ended.ended_by) == (None, EndedBy.WALL_TIME)
        assert value_of(await box.python("x", wall_s=50)) == 2
        assert (await state_of(box, "hogs"))["state"] == "running"
