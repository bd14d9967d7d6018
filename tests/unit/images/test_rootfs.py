"""Making a root file system: refused with the remedy where it cannot be, and broken off cleanly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fumehood.image_store.faults import ImageBuildError
from fumehood.images import rootfs
from fumehood.sandbox.images.recipe import read_recipe

FAKE = """#!/bin/sh
echo "I: running apt-get update..."
echo "I: downloading packages with apt..."
printf '%s\\n' "$@" >"$TMPDIR/arguments"
{then}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of mmdebstrap, run as if by root."""
    program = tmp_path / "mmdebstrap"
    program.write_text(FAKE.format(then="true"))
    program.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    return program


def test_root_build_reports_its_steps_and_uses_the_recipe(fake: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    rootfs.make_root(read_recipe("python"), tmp_path / "root.tar", steps.append)
    assert steps == ["running apt-get update", "downloading packages with apt"]
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"--variant=minbase", "--mode=root"} <= {*arguments}
    # mmdebstrap's own cleaning would remove apt's lists of the host, because `finish` has removed
    # the configuration that says otherwise.
    assert "--skip=cleanup/apt" in arguments
    assert f"--include={','.join(read_recipe('python').packages)}" in arguments
    assert arguments[-2:] == ["bookworm", str(tmp_path / "root.tar")]


def test_root_build_of_an_ordinary_user_uses_subordinate_ids(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    rootfs.make_root(read_recipe("python"), tmp_path / "root.tar", lambda step: None)
    assert "--mode=unshare" in (tmp_path / "arguments").read_text().splitlines()


def test_interrupted_build_leaves_no_process(fake: Path, tmp_path: Path) -> None:
    fake.write_text(
        FAKE.format(then='echo $$ >"$TMPDIR/pid"; echo "I: installing x..."; exec sleep 600')
    )

    def interrupt(step: str) -> None:
        if step == "installing x":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rootfs.make_root(read_recipe("python"), tmp_path / "root.tar", interrupt)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("user", "fault", "remedy"),
    [
        (1000, "needs root", "uidmap"),
        (0, "mmdebstrap is not installed", "apt-get install mmdebstrap"),
    ],
)
def test_root_build_that_cannot_begin_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, fault: str, remedy: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ImageBuildError, match=fault) as error:
        rootfs.make_root(read_recipe("python"), tmp_path / "root.tar", lambda _: None)
    assert remedy in error.value.remedy
