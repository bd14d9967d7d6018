"""Control groups of sandboxes, on directories that look like those of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fumehood.direct import cgroups
from fumehood.direct.cgroups import Groups, NotLimited

V1_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us"),
    "pids": ("pids.max",),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", str(tmp_path))
    return tmp_path


def of_version_1(root: Path, *controllers: str) -> Groups:
    for controller in controllers:
        (root / controller).mkdir()
    return Groups("fumehood-x")


def of_version_2(root: Path) -> Groups:
    (root / "cgroup.controllers").write_text("cpu memory pids")
    (root / "cgroup.subtree_control").write_text("")
    return Groups("fumehood-x")


def test_group_of_version_1_has_all_limits(root: Path) -> None:
    groups = of_version_1(root, "memory", "pids", "cpu", "cpuacct", "freezer")
    group = groups.make("one", 1 << 20, 7, 1.5)
    read = {
        file: (root / controller / "fumehood-x" / "one" / file).read_text()
        for controller, files in V1_FILES.items()
        for file in files
    }
    assert read == {
        "memory.limit_in_bytes": "1048576", "memory.memsw.limit_in_bytes": "1048576",
        "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000", "pids.max": "7",
    }  # fmt: skip
    assert set(group.shown()) == {"memory", "pids", "cpuacct"}
    assert os.stat(group.paths["memory"]).st_mode & 0o777 == 0o755


def test_group_of_version_2_has_all_limits(root: Path) -> None:
    group = of_version_2(root).make("one", 1 << 20, 7, 0.5)
    folder = root / "fumehood-x" / "one"
    names = ("memory.max", "memory.swap.max", "cpu.max", "pids.max")
    assert [(folder / name).read_text() for name in names] == [
        "1048576", "0", "50000 100000", "7",
    ]  # fmt: skip
    assert (root / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert group.shown() == {"": str(folder)}


@pytest.mark.parametrize("missing", ["memory", "pids", "cpu"])
def test_host_without_a_controller_has_no_groups(root: Path, missing: str) -> None:
    others = {"memory", "pids", "cpu"} - {missing}
    groups = of_version_1(root, *others)
    assert groups.version == cgroups.NONE
    assert cgroups.missing_controllers() == [missing]
    group = groups.make("one", 1 << 20, 7, 1)
    assert (group.paths, group.shown(), group.freeze(frozen=True)) == ({}, {}, False)
    group.join()
    group.kill()
    group.remove()
    groups.share(1)
    groups.sweep(set())
    groups.close()
    assert not [*root.glob("**/fumehood-x")]
    (root / missing).mkdir()  # the control: with it, there are groups
    assert Groups("fumehood-x").make("one", 1 << 20, 7, 1).paths


def test_host_of_version_2_without_a_controller_has_no_groups(root: Path) -> None:
    of_version_2(root)
    (root / "cgroup.controllers").write_text("cpu pids")
    assert (Groups("x").version, cgroups.missing_controllers()) == (cgroups.NONE, ["memory"])


def test_limit_that_cannot_be_set_leaves_no_group(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = of_version_2(root)

    def refuse(self: cgroups.Group, controller: str, file: str, value: object) -> None:
        if file == "pids.max":
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cgroups.Group, "write", refuse)
    with pytest.raises(NotLimited, match="Permission denied"):
        groups.make("one", 1 << 20, 7, 1)
    assert not (root / "fumehood-x" / "one").exists()


def test_share_of_the_processors_grows_with_the_number_of_sandboxes(root: Path) -> None:
    groups = of_version_2(root)
    groups.make("one", 1 << 20, 7, 1)
    for count, weight in ((0, "100"), (1, "100"), (30, "3000"), (1000, "10000")):
        groups.share(count)
        assert (root / "fumehood-x" / "cpu.weight").read_text() == weight


@pytest.mark.parametrize(
    ("text", "expected"), [("low 0\noom_kill 0\n", False), ("oom_kill 3\n", True), ("", False)]
)
def test_memory_ran_out_if_a_process_was_killed(root: Path, text: str, expected: bool) -> None:
    group = of_version_2(root).make("one", 1 << 20, 7, 1)
    Path(group.paths["memory"], "memory.events").write_text(text)
    assert group.ran_out_of_memory() is expected
