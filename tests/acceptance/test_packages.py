"""Packages that a session or a call asks for, from an index of one folder. Through daemons."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, ready_image, running_daemon
from fumehood import Client, Envelope, FumehoodError
from fumehood.docker.api import open_docker
from fumehood.docker.store import LAYERS
from fumehood.sandbox.container.spec import LABEL_OWNER
from fumehood.storage.directory import owner_id
from support.containers import containers_of
from support.wait import wait_until
from support.wheels import only_from, write_wheel

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S11", "E1")]

VERSION = "import tool; print(tool.VERSION, tool.__file__)"
SEEN = "1.0 /opt/fumehood/packages/tool.py\n"


def index_of(folder: Path) -> Path:
    write_wheel(folder, "tool", needs=["other>=1"])
    write_wheel(folder, "other")
    return folder


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index_of(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def daemon(index: Path, python_image: object) -> Iterator[Daemon]:
    with running_daemon(variables(index)) as running:
        yield running


def variables(index: Path, allow: str = '["*"]') -> dict[str, str]:
    return {**only_from(index), "FUMEHOOD_PACKAGES__ALLOW": allow}


def run(client: Client, code: str, **options: Any) -> Envelope:
    return client.call("run_python", {"code": code}, **options)


def printed(envelope: Envelope) -> Any:
    assert envelope.error is None, envelope.error
    return envelope.data["stdout"]


def refusal(client: Client, *packages: str) -> str:
    """Why a session with these packages is refused."""
    with pytest.raises(FumehoodError) as caught:
        client.create_session(packages=list(packages), memory_mb=128)
    assert caught.value.code == "INVALID_PARAMS"
    return caught.value.message


def test_session_has_the_packages_that_it_was_made_with(daemon: Daemon) -> None:
    done = subprocess.run(
        [str(FUMEHOOD), "sessions", "new", "--package", "tool>=1", "--memory", "128", "--json"],
        env=daemon.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    made = json.loads(done.stdout)
    assert made["packages"] == ["other==1.0", "tool==1.0"]
    again = (
        "import subprocess\nsubprocess.run(['python3', '-c', 'import tool; print(tool.VERSION)'])"
    )
    with Client(daemon.socket) as client:
        assert printed(run(client, VERSION, session_id=made["id"])) == SEEN
        assert printed(run(client, again, session_id=made["id"])) == "1.0\n"
        refused = run(client, VERSION, session_id=made["id"], packages=["tool"])
        assert refused.error.fields == ("options.packages",)
        client.end_session(made["id"])


def test_call_has_its_packages_and_the_next_one_has_not(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        assert printed(run(client, VERSION, packages=["tool"])) == SEEN
        without = run(client, VERSION)
        assert "No module named 'tool'" in without.error.message
        assert "option packages" in without.error.message


def test_packages_cannot_be_changed_by_programs(daemon: Daemon) -> None:
    write = "open('/opt/fumehood/packages/tool.py', 'w')"
    with Client(daemon.socket) as client:
        failed = run(client, write, packages=["tool"])
        assert "Read-only file system" in failed.error.message


def test_code_of_a_package_runs_only_in_programs(daemon: Daemon, index: Path) -> None:
    """pandas, which the image loads before all programs, imports this one if it is there."""
    ready_image("python-data")
    told = "import os\nTOLD = os.getuid()\n__version__ = '99'\n"
    write_wheel(index, "bottleneck", files={"bottleneck/__init__.py": told})
    code = (
        "import sys\nprint('pandas' in sys.modules, 'bottleneck' in sys.modules)\n"
        "import bottleneck\nprint(bottleneck.TOLD > 10_000)"
    )
    with Client(daemon.socket) as client:
        made = client.create_session(image="python-data", packages=["bottleneck"])
        assert printed(run(client, code, session_id=made.id)) == "True False\nTrue\n"
        client.end_session(made.id)


def test_layer_that_was_removed_is_made_again(daemon: Daemon, index: Path) -> None:
    write_wheel(index, "removed")
    with Client(daemon.socket) as client, closing(open_docker(timeout_s=30)) as docker:
        before = {row["Id"] for row in docker.images(name=LAYERS)}
        first = client.create_session(packages=["removed"], memory_mb=128)
        made = {row["Id"] for row in docker.images(name=LAYERS)} - before  # also by others
        mine = containers_of(f"{LABEL_OWNER}={owner_id(daemon.home)}")
        (layer,) = made & {container["Image"] for container in mine}
        client.end_session(first.id)
        wait_until(lambda: not docker.containers(all=True, filters={"ancestor": layer}))
        docker.remove_image(layer, force=True)
        second = client.create_session(packages=["removed"], memory_mb=128)
        code = "import removed; print(removed.VERSION)"
        assert printed(run(client, code, session_id=second.id)) == "1.0\n"
        client.end_session(second.id)


def test_what_cannot_be_installed_is_refused_by_name(daemon: Daemon, index: Path) -> None:
    write_wheel(index, "needy", needs=["tool>=2"])
    write_wheel(index, "odd", files={"../../evil.py": ""})
    (index / "source-1.0.tar.gz").write_bytes(b"")
    with Client(daemon.socket) as client:
        assert "has no package 'nothing'" in refusal(client, "nothing")
        assert "tool>=2" in refusal(client, "needy")
        assert "No version of tool" in refusal(client, "tool>=3")
        assert "not a file below its own folder" in refusal(client, "odd")
        assert "source" in refusal(client, "source")
        assert "is an option" in refusal(client, "--index-url=http://127.0.0.1")
        assert "is an address" in refusal(client, "tool @ file:///etc/passwd")
        assert "is a path" in refusal(client, "./tool-1.0-py3-none-any.whl")
        assert "named twice" in refusal(client, "tool", "Tool")
        call = client.call("calculator", {"expression": "1"}, packages=["tool"])
        assert call.error.fields == ("options.packages",)


def test_only_allowed_names_are_asked_for(
    start_daemon: StartDaemon, home: Path, index: Path, python_image: object
) -> None:
    daemon = start_daemon(home, variables=variables(index, '["TOOL"]'))
    with Client(daemon.socket) as client:
        assert "does not allow other" in refusal(client, "tool", "other")
        assert client.create_session(packages=["tool"], memory_mb=128).packages[0] == "other==1.0"


@pytest.mark.needs("disks")
def test_stopped_session_keeps_its_versions(
    start_daemon: StartDaemon, home: Path, tmp_path: Path, python_image: object
) -> None:
    """Also without the index, with a newer version, and with another engine."""
    index = index_of(tmp_path / "index")
    daemon = start_daemon(home, variables=variables(index))
    with Client(daemon.socket) as client:
        made = client.create_session(packages=["tool"], disk_mb=16, memory_mb=128)
        client.stop_session(made.id)
    daemon.stop()
    write_wheel(index, "tool", "2.0")
    (index / "tool-1.0-py3-none-any.whl").unlink()
    second = start_daemon(home, variables=variables(index))
    with Client(second.socket) as client:
        answer = run(client, VERSION, session_id=made.id)
        assert printed(answer) == SEEN
        assert answer.data["session"]["state"] == "restarted"
        assert client.session(made.id).packages == ("other==1.0", "tool==1.0")
        client.end_session(made.id)
    second.stop()  # which removes its disk
