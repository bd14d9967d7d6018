"""gVisor without Docker, for an ordinary user who has no subordinate ids and no control group.

gVisor's own kernel has all user ids. The launcher watches the memory of the whole sandbox.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from integration.test_direct_user import FORKS_THAT_EAT
from support import direct_as_user
from support.ordinary_user import (
    Host,
    assert_all_held,
    assert_doctor_names_the_grade,
    ordinary_user,
)

pytestmark = [pytest.mark.needs("direct", "runsc"), pytest.mark.row("B13")]

FILES = (
    "for d in ('/tmp/f', '/dev/shm/f', 'f'):\n"
    "    try:\n        with open(d, 'wb') as f:\n            while True: f.write(bytes(1 << 20))\n"
    "    except OSError: pass\n"
)  # fmt: skip
EATEN = FORKS_THAT_EAT.replace("{count}", "4").replace("{mb}", "45")
"""With the files it is more than the limit of 288 MB, without them less."""

CODES = {
    # First: after a run without memory, a container that is lost for memory does not say so.
    "files-and-memory": FILES + EATEN.format(s=30),
    "memory": EATEN.format(s=0.5),
    "children": FORKS_THAT_EAT.format(count=12, mb=40, s=30),
    "children-twin": FORKS_THAT_EAT.format(count=6, mb=8, s=0.2),
    "cpu": "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\n"
           "time.sleep(600)",
    "alone": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "alone-twin": "len(bytearray(60 << 20))",
    "files": FILES + "n = 1\nn",
    "kernel": "import os\n[os.getuid(), os.uname().release, os.stat('/usr').st_uid]",
}  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with ordinary_user("gvisor", has_sub_ids=False) as host:
        yield host


@pytest.fixture(scope="module")
def said(host: Host) -> dict[str, Any]:
    """What the user's program has printed, after its sandbox has run all codes."""
    return driven(host, CODES)


def driven(host: Host, codes: dict[str, str]) -> dict[str, Any]:
    script = host.home.parent / "driver.py"
    shutil.copyfile(direct_as_user.__file__, script)
    script.chmod(0o644)
    request = json.dumps({"image": "host", "codes": codes, "engine": "gvisor"})
    done = host.run(str(host.installation.python), str(script), request)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def ended(said: dict[str, Any], name: str) -> tuple[str, Any]:
    found = said["ended"][name]
    return found["ended_by"], found["value"]


def test_program_runs_on_another_kernel_where_the_hosts_root_is_nobody(
    said: dict[str, Any],
) -> None:
    kind, (uid, release, owner) = ended(said, "kernel")
    assert (kind, uid, release, owner) == ("ok", 10001, "4.4.0", 65534)
    assert said["hello"]["ids"] is None


def test_memory_of_the_whole_sandbox_is_watched(said: dict[str, Any]) -> None:
    assert ended(said, "children")[0] == "memory"
    assert ended(said, "children-twin")[0] == "ok"
    assert ended(said, "alone")[0] == "memory"
    assert ended(said, "alone-twin") == ("ok", 60 << 20)
    assert ended(said, "files") == ("ok", 1)
    assert ended(said, "files-and-memory")[0] == "memory"
    assert ended(said, "memory")[0] == "ok"


def test_cpu_time_of_all_processes_together_is_limited(said: dict[str, Any]) -> None:
    assert ended(said, "cpu")[0] == "cpu_time"


def test_session_outlives_its_launcher_and_its_engine(said: dict[str, Any]) -> None:
    lives = said["lives"]
    assert lives["counted"] == [1, 2, 3, 4]
    assert lives["held"] is True
    assert lives["kept_paused"] is True  # by the next launcher
    assert lives["grade"] == "watched"
    assert (lives["gone"], lives["left"]) == (True, [])


def test_grade_is_refused_unless_the_operator_names_it(said: dict[str, Any]) -> None:
    assert said["refused"] == (
        "GradeTooLow: Containers on this host have the grade watched, not namespaces."
    )


def test_program_without_a_guest_is_refused(said: dict[str, Any]) -> None:
    assert "watch the program's memory" in said["program"]


def test_user_without_subordinate_ids_runs_no_direct_sandbox(host: Host) -> None:
    code = "import fumehood.direct.host as h; print(h.why_unfit(None))"
    done = host.run(str(host.installation.python), "-c", code)
    assert "This user has no subordinate ids" in done.stdout, done.stderr


@pytest.mark.usefixtures("said")
def test_all_attacks_hold_and_the_grade_is_shown(host: Host) -> None:
    assert_all_held(host.attacked())


@pytest.mark.usefixtures("said")
def test_doctor_names_the_grade_and_how_to_accept_it(host: Host) -> None:
    assert_doctor_names_the_grade(host)
    accepted = host.findings(FUMEHOOD_CONTAINER__LEAST_GRADE="watched")
    assert "fumehood images build" in accepted["gvisor: image python-data"]["cure"]


@pytest.mark.needs("subids")
def test_with_subordinate_ids_gvisor_itself_is_nobody_on_the_host() -> None:
    with ordinary_user("gvisor", has_sub_ids=True) as host:
        said = driven(host, {"kernel": CODES["kernel"]})
        assert ended(said, "kernel") == ("ok", [10001, "4.4.0", 65534])
        first, _ = said["hello"]["ids"]
        assert first > 0
        lives = said["lives"]
        assert (lives["counted"], lives["held"], lives["left"]) == ([1, 2, 3, 4], True, [])
        lines = lives["status"].splitlines()
        (users,) = ({*line.split()[1:]} for line in lines if line.startswith("Uid:"))
        assert users.isdisjoint({"0", str(host.user.uid)})
