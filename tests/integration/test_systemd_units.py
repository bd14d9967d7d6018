"""The systemd unit files match the engine's needs and defaults and each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from conftest import FUMEHOOD
from fumehood import Config
from fumehood.config import ServiceConfig

UNITS = Path(__file__).parents[2] / "systemd"
FOLDERS = ("system", "user")
SOCKETS = ("engine", "control")


def settings(path: Path) -> dict[str, list[str]]:
    """Every setting of a unit with all its values; fails on an invalid line."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith(("#", "[")):
            continue
        setting = re.fullmatch(r"([A-Z][A-Za-z]+)=(.*)", line)
        assert setting is not None, line
        found[setting[1]].append(setting[2])
    return found


def service_of(folder: str) -> dict[str, list[str]]:
    return settings(UNITS / folder / "fumehood.service")


@pytest.mark.row("D6")
def test_service_unit_directories_match_the_engines_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unit, defaults = service_of("system"), ServiceConfig()
    for assignment in unit["Environment"]:
        monkeypatch.setenv(*assignment.split("=", 1))
    config = Config()
    assert config.mode == "service"
    assert config.state_directory == Path("/var/lib") / unit["StateDirectory"][0]
    assert defaults.run_directory == Path("/run") / unit["RuntimeDirectory"][0]
    assert unit["StateDirectoryMode"] == ["0700"]
    assert unit["RuntimeDirectoryMode"] == ["0711"]
    groups = [defaults.callers_group, defaults.approvers_group]
    assert unit["SupplementaryGroups"] == [" ".join(groups)]
    assert unit["User"] == ["fumehood"]


@pytest.mark.row("D1", "D4", "D6")
@pytest.mark.parametrize("name", SOCKETS)
def test_socket_units_match_the_engines_paths_names_and_modes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    defaults = ServiceConfig()
    system = settings(UNITS / "system" / f"fumehood-{name}.socket")
    service = Config(mode="service")
    user = settings(UNITS / "user" / f"fumehood-{name}.socket")
    single = Config()
    paths = {
        "engine": (service.socket_path, single.socket_path),
        "control": (service.control_socket_path, single.control_socket_path),
    }[name]
    group = {"engine": defaults.callers_group, "control": defaults.approvers_group}[name]
    assert system["ListenStream"] == [str(paths[0])]
    assert (system["SocketUser"], system["SocketGroup"]) == (["fumehood"], [group])
    assert system["SocketMode"] == ["0660"]
    assert [path.replace("%t", "/run/user/1") for path in user["ListenStream"]] == [str(paths[1])]
    assert (user["SocketMode"], user["DirectoryMode"]) == (["0600"], ["0700"])
    for unit in (system, user):
        assert unit["FileDescriptorName"] == [name]
        assert unit["Service"] == ["fumehood.service"]
        assert "Accept" not in unit


@pytest.mark.row("D1", "D4")
def test_tmpfiles_and_sysusers_create_private_directories_and_groups() -> None:
    defaults = ServiceConfig()
    run = defaults.run_directory
    made = {
        tuple(line.split()[:5])
        for line in (UNITS / "system/tmpfiles.conf").read_text().splitlines()
        if line.startswith("d ")
    }
    assert made == {
        ("d", str(run), "0711", "fumehood", "fumehood"),
        ("d", str(run / "engine"), "0750", "fumehood", defaults.callers_group),
        ("d", str(run / "control"), "0750", "fumehood", defaults.approvers_group),
    }
    users = (UNITS / "system/sysusers.conf").read_text()
    for group in (defaults.callers_group, defaults.approvers_group):
        assert f"\ng {group} " in f"\n{users}"
        assert f"\nm fumehood {group}\n" in users


@pytest.mark.row("D6", "S2")
def test_service_unit_is_hardened_but_allows_the_guests_own_sandboxing() -> None:
    unit = service_of("system")
    for name, value in {
        "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "ProtectSystem": "strict",
        "ProtectHome": "yes", "PrivateTmp": "yes", "RestrictNamespaces": "yes",
        "ProtectProc": "invisible", "OOMPolicy": "continue", "UMask": "0077",
    }.items():  # fmt: skip
        assert unit[name] == [value], name
    # The set of system calls for services does not hold these.
    allowed = " ".join(unit["SystemCallFilter"]).split()
    assert {"@system-service", "seccomp", "landlock_restrict_self"} <= set(allowed)
    assert not any(call.startswith("~") for call in allowed)
    # With users of its own, every caller would be the same one.
    assert not {"PrivateUsers", "DynamicUser", "MemoryDenyWriteExecute", "ProcSubset"} & unit.keys()


@pytest.mark.row("D6")
@pytest.mark.parametrize("folder", FOLDERS)
def test_service_unit_uses_notify_and_outlasts_the_engines_drain(folder: str) -> None:
    unit = service_of(folder)
    assert unit["Type"] == ["notify"]
    assert int(unit["TimeoutStopSec"][0]) >= Config().drain_seconds + 10
    assert unit["KillMode"] == ["mixed"]


@pytest.mark.row("B10", "S2")
def test_node_runs_apart_from_the_engine_which_can_use_its_sockets() -> None:
    node, engine = settings(UNITS / "system/fumehood-node.service"), service_of("system")
    cluster = settings(UNITS / "system/cluster.conf")
    assert node["User"] != engine["User"]
    assert cluster["SupplementaryGroups"] == node["Group"] == node["User"]
    directory = f"/var/cache/{node['CacheDirectory'][0]}"
    assert cluster["ReadWritePaths"] == [f"-{directory}"]
    for unit in (node, cluster):
        assert f"RAY_TMPDIR={directory}" in unit["Environment"]
        assert "RAY_AUTH_TOKEN_PATH=/etc/fumehood/ray.token" in unit["Environment"]
    assert (node["UMask"], node["CacheDirectoryMode"]) == (["0007"], ["0750"])


@pytest.mark.needs("systemd")
@pytest.mark.row("D6")
def test_systemd_analyze_accepts_every_unit(tmp_path: Path) -> None:
    for unit in (UNITS / "system").glob("fumehood*"):
        text = unit.read_text(encoding="utf-8").replace("/opt/fumehood/bin/fumehood", str(FUMEHOOD))
        (tmp_path / unit.name).write_text(text, encoding="utf-8")

    drop_in = tmp_path / "fumehood.service.d" / "cluster.conf"
    drop_in.parent.mkdir()
    shutil.copy(UNITS / "system/cluster.conf", drop_in)

    def words() -> str:
        units = sorted(str(unit) for unit in tmp_path.iterdir() if unit.is_file())
        done = subprocess.run(
            [str(shutil.which("systemd-analyze")), "verify", "--man=no", *units],
            capture_output=True, timeout=600,
        )  # fmt: skip
        return done.stderr.decode()

    assert words() == ""
    service = tmp_path / "fumehood.service"
    service.write_text(service.read_text() + "\n[Service]\nNoSuchSetting=yes\n")
    assert "NoSuchSetting" in words()  # control
    drop_in.write_text("[Service]\nNorThisOne=yes\n")
    assert "NorThisOne" in words()
