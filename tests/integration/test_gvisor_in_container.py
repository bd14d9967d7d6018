"""gVisor without Docker, in a container that may create namespaces."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from integration.test_direct_in_container import (
    PATHS,
    SAYS_WHY,
    SECCOMP,
    in_docker,
    run_in_container,
)
from support import direct_as_user

pytestmark = [pytest.mark.needs("direct", "runsc"), in_docker, pytest.mark.row("B13")]

CODES = {"kernel": "import os\n[os.getuid(), os.uname().release]"}


def ran(options: list[str], user: int) -> dict[str, Any]:
    """What the driver printed in a container, in which a user has a volume for images."""
    place = Path(tempfile.mkdtemp(prefix="fh-gvisor-", dir="/tmp"))
    place.chmod(0o755)
    try:
        own = place / "own"
        own.mkdir(mode=0o700)
        os.chown(own, user, user)
        shutil.copyfile(direct_as_user.__file__, place / "driver.py")
        runsc = shutil.which("runsc")
        request = json.dumps({"image": "host", "codes": CODES, "engine": "gvisor"})
        options = [
            *options, f"--user={user}:{user}", f"--volume={own}:/own", "--env=XDG_DATA_HOME=/own",
            "--env=FUMEHOOD_LAUNCHER_DIRECTORY=/own/launcher", f"--volume={runsc}:/usr/bin/runsc:ro",
        ]  # fmt: skip
        if user == 0:
            options.append(f"--volume={own}/layers:/var/lib/fumehood/layers")
        answer: dict[str, Any] = json.loads(
            run_in_container(place, options, "/place/driver.py", request)
        )
        return answer
    finally:
        shutil.rmtree(place)


def test_engine_says_what_the_container_must_permit(tmp_path: Path) -> None:
    runsc = f"--volume={shutil.which('runsc')}:/usr/bin/runsc:ro"
    code = SAYS_WHY.replace("direct", "gvisor")
    assert "missing" in run_in_container(tmp_path, [SECCOMP, PATHS], "-c", code)
    assert "seccomp=unconfined" in run_in_container(tmp_path, [runsc], "-c", code)
    assert "systempaths=unconfined" in run_in_container(tmp_path, [runsc, SECCOMP], "-c", code)


@pytest.mark.parametrize("user", [0, 1000], ids=["root", "user"])
def test_programs_run_in_a_container_also_for_a_user_without_subordinate_ids(user: int) -> None:
    said = ran([SECCOMP, PATHS], user)
    assert said["ended"]["kernel"]["value"] == [10001, "4.4.0"]
    assert said["lives"]["counted"] == [1, 2, 3, 4]  # also after the launcher was killed
    assert (said["lives"]["grade"], said["lives"]["left"]) == ("watched", [])
    assert said["refused"].startswith("GradeTooLow")
