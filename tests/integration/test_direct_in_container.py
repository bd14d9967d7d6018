"""An engine in a container or a pod: it runs programs if it may create namespaces there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

import fumehood
from conftest import ready_image
from fumehood.direct.store import open_store
from fumehood.sandbox.images.recipe import images_folder
from support import as_pod, direct_as_user
from support.direct import ready_direct_image
from support.users import readable_installation

pytestmark = [pytest.mark.needs("direct"), pytest.mark.row("B13")]

in_docker = pytest.mark.needs(
    # The engine's libraries are mounted into a container of an image with Debian's Python.
    "docker", "python-of-images",
)  # fmt: skip

SECCOMP = "--security-opt=seccomp=unconfined"
PATHS = "--security-opt=systempaths=unconfined"
CODES = {"user": "import os\n[os.getuid(), open('/proc/self/uid_map').read().split()]"}
SAYS_WHY = """
from fumehood.direct.host import why_unfit
unfit = why_unfit(None)
print("fit" if unfit is None else f"{unfit.message} {unfit.remedy}")
"""


def run_in_container(place: Path, options: list[str], *arguments: str) -> str:
    """Run Python with the engine in a container, and return what it printed. `place` is mounted."""
    engine = Path(fumehood.__file__).parents[1]
    done = subprocess.run(
        [
            "docker", "run", "--rm", "--network=none", "--user=0", "--memory=1g", *options,
            "--entrypoint=/usr/bin/python3", "--env=HOME=/root", "--env=PYTHONDONTWRITEBYTECODE=1",
            "--env=PYTHONPATH=/fh/engine:/fh/site", f"--volume={engine}:/fh/engine:ro",
            f"--volume={sysconfig.get_path('purelib')}:/fh/site:ro", f"--volume={place}:/place:ro",
            f"--volume={images_folder()}:/fh/sandbox_images:ro",
            ready_image("python").id, *arguments,
        ],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@in_docker
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "user namespaces. In a container of Docker: --security-opt seccomp=unconfined"),
        ([SECCOMP], "/proc"),
        ([SECCOMP, PATHS], "fit"),
    ],
    ids=["default", "seccomp", "both"],
)
def test_engine_says_what_the_container_must_permit(
    options: list[str], words: str, tmp_path: Path
) -> None:
    assert words in run_in_container(tmp_path, options, "-c", SAYS_WHY)


@in_docker
def test_root_in_a_container_runs_programs_of_the_grade_watched(tmp_path: Path) -> None:
    with (tmp_path / "image.tar").open("wb") as file:
        open_store().save(ready_direct_image("python").id, file)
    shutil.copyfile(direct_as_user.__file__, tmp_path / "driver.py")
    request = json.dumps({"image": "/place/image.tar", "codes": CODES})
    said = json.loads(run_in_container(tmp_path, [SECCOMP, PATHS], "/place/driver.py", request))
    assert said["ended"]["user"]["value"] == [10001, ["0", "2000000000", "65536"]]
    assert said["lives"]["counted"] == [1, 2, 3, 4]  # also after the launcher was killed
    assert (said["lives"]["grade"], said["lives"]["left"]) == ("watched", [])
    assert said["refused"].startswith("GradeTooLow")


@in_docker
def test_container_with_a_volume_runs_its_own_programs_without_a_foreign_image(
    tmp_path: Path,
) -> None:
    """The file system of a container cannot hold layers, but a volume can."""
    layers = tmp_path / "layers"
    layers.mkdir(mode=0o700)
    shutil.copyfile(direct_as_user.__file__, tmp_path / "driver.py")
    request = json.dumps({"image": "host", "codes": CODES})
    volume = f"--volume={layers}:/var/lib/fumehood/layers"
    said = json.loads(
        run_in_container(tmp_path, [SECCOMP, PATHS, volume], "/place/driver.py", request)
    )
    assert said["ended"]["user"]["value"] == [10001, ["0", "2000000000", "65536"]]
    assert (said["lives"]["grade"], said["lives"]["left"]) == ("watched", [])
    shutil.rmtree(layers)


@pytest.mark.needs("root")
def test_root_of_a_pod_with_its_own_users_runs_programs() -> None:
    """Such a pod has 65,536 ids. Sandboxes get the upper half of them."""
    place = Path(tempfile.mkdtemp(prefix="fh-pod-", dir="/tmp"))
    place.chmod(0o755)
    first = 400_000_000 + os.getpid() % 10_000 * 65_536
    try:
        own_lib = place / "lib"
        own_lib.mkdir(mode=0o700)
        os.chown(own_lib, first, first)
        installation = readable_installation(place / "engine")
        shutil.copyfile(direct_as_user.__file__, place / "driver.py")
        request = json.dumps({"image": "host", "codes": CODES})
        environment = {
            **installation.environment, "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1",
            "FUMEHOOD_LAUNCHER_DIRECTORY": "/var/lib/launcher",
        }  # fmt: skip
        done = subprocess.run(
            [
                sys.executable, "-I", as_pod.__file__, str(first), own_lib,
                str(installation.python), place / "driver.py", request,
            ],
            env=environment, cwd="/", capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["ended"]["user"]["value"] == [10001, ["0", "32768", "32768"]]
        assert (said["lives"]["grade"], said["lives"]["left"]) == ("watched", [])
        installation.close()
    finally:
        shutil.rmtree(place)
