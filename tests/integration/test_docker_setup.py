"""`scripts/docker-setup` starts Docker only if none is running; and the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from support.preloaded import commands
from support.wait import DEADLINE_S

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "scripts" / "docker-setup"
DEMO = ROOT / "scripts" / "demo.py"
REGISTER = ROOT / "scripts" / "register_runsc.py"

FRESH_MACHINE = """
set -e
for place in /run /etc/docker /var/lib/docker /var/lib/containerd /var/log; do
    [ -d "$place" ] && mount -t tmpfs none "$place"
done
"$@" && "$@"
"$PYTHON" - <<'EOF'
import json, socket
with socket.socket(socket.AF_UNIX) as link:
    link.connect("/var/run/docker.sock")
    link.sendall(b"GET /info HTTP/1.0\\r\\n\\r\\n")
    answer = b"".join(iter(lambda: link.recv(65536), b""))
print(json.dumps(sorted(json.loads(answer.split(b"\\r\\n\\r\\n", 1)[1])["Runtimes"])))
EOF
"""
"""Runs the setup script twice on a machine without Docker, then prints the engine's runtimes."""


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**CLEAN_ENVIRONMENT, "PYTHON": sys.executable, **variables},
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.fixture
def watched_path(home: Path) -> str:
    """A PATH on which `apt-get`, `dockerd` and `setsid` are fakes that record their use."""
    for name in ("apt-get", "dockerd", "setsid"):
        program = home / name
        program.write_text(f"#!/bin/sh\necho {name} >>{home}/ran\nexit 1\n")
        program.chmod(0o755)
    return f"{home}:{CLEAN_ENVIRONMENT['PATH']}"


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "there"])
def test_comparison_builds_on_no_image_that_docker_would_download(
    home: Path, is_there: bool
) -> None:
    for place in ("scripts", "requirements", ".venv/compare", "bin"):
        (home / place).mkdir(parents=True)
    (home / "scripts/compare").write_bytes((ROOT / "scripts/compare").read_bytes())
    for lock in ("requirements/compare.lock", ".venv/compare/.installed"):
        (home / lock).write_text("")
    answers = {"fumehood": 0, "bwrap": 0, "python": 7, "docker": 0}
    for name, status in answers.items():
        program = home / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>{home}/ran\nexit {status}\n')
        program.chmod(0o755)
    if not is_there:
        (home / "bin/docker").write_text(
            f'#!/bin/sh\necho "docker $*" >>{home}/ran\n[ "$1" = build ]\n'
        )
    path = f"{home}/bin:{CLEAN_ENVIRONMENT['PATH']}"
    done = run("bash", home / "scripts/compare", home / "bin", PATH=path)
    ran = (home / "ran").read_text()
    assert ("docker build" in ran) is is_there, ran
    assert done.returncode == (7 if is_there else 1), done.stderr
    assert ("would download" in done.stderr) is not is_there


@pytest.mark.needs("docker", "runsc")
def test_setup_leaves_a_running_docker_untouched(home: Path, watched_path: str) -> None:
    settings = Path("/etc/docker/daemon.json")
    before = settings.read_bytes() if settings.exists() else None
    for arguments in ([], ["--with-runsc"]):
        done = run(SETUP, *arguments, PATH=watched_path)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not (home / "ran").exists()
    assert (settings.read_bytes() if settings.exists() else None) == before


@pytest.mark.parametrize("address", ["unix:///nonexistent/docker.sock", "tcp://127.0.0.1:9"])
def test_setup_with_unreachable_docker_host_fails_without_installing(
    home: Path, watched_path: str, address: str
) -> None:
    done = run(SETUP, PATH=watched_path, DOCKER_HOST=address)
    assert done.returncode == 3
    assert "DOCKER_HOST" in done.stderr
    assert not (home / "ran").exists()


@pytest.mark.needs("root")
def test_setup_without_root_exits_3_naming_root(home: Path, watched_path: str) -> None:
    home.chmod(0o777)
    done = subprocess.run(  # by its text: that user may not be able to read the checkout
        ["sh", "-s"], input=SETUP.read_text(), cwd="/", user=65534, group=65534, extra_groups=(),
        env={"PATH": watched_path, "PYTHON": "python3"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "root" in done.stderr
    assert not (home / "ran").exists()


ALONE = ("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc")
"""Starts a command in its own mount, process and network namespaces."""


@pytest.mark.needs("root", "docker", "runsc")
def test_setup_starts_docker_exactly_once_on_a_fresh_machine() -> None:
    done = run(*ALONE, "sh", "-c", FRESH_MACHINE, "sh", SETUP)
    assert done.returncode == 0, done.stderr
    assert {"runc", "runsc"} <= set(json.loads(done.stdout))
    assert done.stderr.count("starting dockerd") == 1
    assert done.stderr.count("a Docker engine answers") == 1


@pytest.mark.needs("root", "docker", "runsc")
def test_setup_starts_docker_again_if_containerd_was_too_slow(home: Path) -> None:
    real = shutil.which("dockerd", path=f"{CLEAN_ENVIRONMENT['PATH']}:/usr/sbin:/sbin")
    slow = home / "dockerd"
    slow.write_text(
        f"""#!/bin/sh
echo "$*" >>{home}/starts
[ "$(wc -l <{home}/starts)" -gt 2 ] && exec {real} "$@"
echo "failed to start containerd: timeout waiting for containerd to start"
exit 1
"""
    )
    slow.chmod(0o755)
    path = f"{home}:{CLEAN_ENVIRONMENT['PATH']}"
    done = run(*ALONE, "sh", "-c", FRESH_MACHINE, "sh", SETUP, PATH=path)
    assert done.returncode == 0, done.stderr
    assert (home / "starts").read_text() == "\n" * 3


def test_registering_runsc_keeps_all_other_daemon_settings(tmp_path: Path) -> None:
    file = tmp_path / "docker" / "daemon.json"
    assert run(sys.executable, REGISTER, file, "/usr/bin/runsc").returncode == 0
    made = json.loads(file.read_text())
    assert made == {
        "runtimes": {
            "runsc": {
                "path": "/usr/bin/runsc",
                "runtimeArgs": ["--platform=ptrace", "--network=none"],
            }
        }
    }
    file.write_text('{"log-level": "warn", "runtimes": {"crun": {"path": "/usr/bin/crun"}}}')
    file.chmod(0o640)
    assert run(sys.executable, REGISTER, file, "/usr/bin/runsc").returncode == 0
    merged = json.loads(file.read_text())
    assert merged["log-level"] == "warn"
    assert merged["runtimes"] == {"crun": {"path": "/usr/bin/crun"}, **made["runtimes"]}
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(file.parent) == ["daemon.json"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"runtimes": {"runsc": {"path": "/opt/runsc"}}}', 2),
        ("{broken", 1),
        ("[]", 1),
        ('{"runtimes": []}', 1),
        ('{"runtimes": null}', 1),
    ],
)
def test_conflicting_or_invalid_daemon_json_is_left_unchanged(
    tmp_path: Path, text: str, status: int
) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(text)
    assert run(sys.executable, REGISTER, file, "/usr/bin/runsc").returncode == status
    assert file.read_text() == text


@pytest.mark.row("D1")
def test_demo_without_docker_skips_containers_and_prints_working_next_commands(home: Path) -> None:
    """Its commands come from a process that has loaded their modules; `.ci/demo` runs it as it
    stands.
    """
    own = home / "my own"
    (home / "tmp").mkdir()
    starts, quick = "[FUMEHOOD, *arguments]", str(commands(str(FUMEHOOD)) / FUMEHOOD.name)
    text = DEMO.read_text()
    assert starts in text
    program = home / "demo.py"
    program.write_text(text.replace(starts, f"[{quick!r}, *arguments]"))
    done = subprocess.run(
        [sys.executable, program],
        env={**CLEAN_ENVIRONMENT, "TMPDIR": str(home / "tmp"), "FUMEHOOD_HOME": str(own),
             "DOCKER_HOST": f"unix://{home}/docker.sock"},
        cwd=home, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("1144", "systemctl start docker", "without containers", "intact: True"):
        assert shown in done.stdout
    assert not (home / "fumehood-demo").exists()
    assert list((home / "tmp").iterdir()) == []
    *_, then, settings, serve, call = done.stdout.splitlines()
    assert then == "Next, in two terminals:"
    engine = subprocess.Popen(
        ["sh", "-c", f"{settings}; exec {serve}"], env={"PATH": "/usr/bin:/bin"}, cwd="/",
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert engine.stderr is not None
        assert any("fumehood listens on" in line for line in engine.stderr)
        answer = subprocess.run(
            ["sh", "-c", f"{settings}; {call.replace(str(FUMEHOOD), quick)}"], env={"PATH": "/usr/bin:/bin"}, cwd="/",
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    finally:
        engine.terminate()
        engine.communicate(timeout=DEADLINE_S)
    assert json.loads(answer.stdout)["data"]["value"] == 42
    assert own.is_dir()
