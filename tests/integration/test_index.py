"""Resolving, locking and caching wheels for an image, with a real pip on a local folder."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from fumehood.image_store.faults import ImageBuildError
from fumehood.images import index
from fumehood.images.index import fetch, resolve
from fumehood.images.requirements import digest_of_file
from fumehood.sandbox.images.recipe import Lock, Pinned
from support.wheels import only_from, write_wheel

MACHINE = platform.machine()
NATIVE = f"cp311-cp311-manylinux_2_28_{MACHINE}"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder pip may install from."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, value in only_from(folder).items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def silent(_: str) -> None:
    pass


def names(lock: Lock) -> list[str]:
    return [f"{package.name}=={package.version}" for package in lock.packages]


FIT = (NATIVE, f"cp39-abi3-manylinux2014_{MACHINE}", "py2.py3-none-any")
UNFIT = (
    f"cp312-cp312-manylinux_2_28_{MACHINE}",
    f"cp311-cp311-manylinux_2_39_{MACHINE}",
    f"cp311-cp311-musllinux_1_2_{MACHINE}",
    "cp311-cp311-manylinux_2_28_riscv64",
    "cp311-cp311-win_amd64",
)


def test_lock_has_the_newest_versions_that_fit_the_image_not_the_host(
    packages: Path, cache: Path
) -> None:
    """The Python that runs the tests differs from the image's 3.11.2. Each `fit` also has newer
    versions, whose wheels do not fit.
    """
    write_wheel(
        packages, "tool",
        needs=["yes; python_full_version == '3.11.2'", "no; python_full_version != '3.11.2'",
               "never; sys_platform == 'win32'", "mine; platform_machine == '" + MACHINE + "'",
               "part>=2"],
    )  # fmt: skip
    for name in ("yes", "no", "never", "mine"):
        write_wheel(packages, name)
    for version in ("1.0", "2.0"):
        write_wheel(packages, "part", version)
    for number, tag in enumerate(FIT):
        write_wheel(packages, f"fit{number}", tag=tag)
        for newer, unfit in enumerate(UNFIT, start=2):
            write_wheel(packages, f"fit{number}", f"{newer}.0", tag=unfit)
    lock = resolve("tool\nfit0\nfit1\nfit2\n", "bookworm", cache, silent)
    fit = ["fit0==1.0", "fit1==1.0", "fit2==1.0"]
    assert names(lock) == [*fit, "mine==1.0", "part==2.0", "tool==1.0", "yes==1.0"]
    assert all(len(package.hashes) == 1 for package in lock.packages)


def test_wheels_are_taken_from_the_cache_unless_changed_and_from_the_index_only_as_locked(
    packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(packages, "tool")
    lock = resolve("tool\n", "bookworm", cache, silent)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_run", lambda *_: pytest.fail("pip was run"))
        steps: list[str] = []
        (wheel,) = fetch(lock, "bookworm", cache, steps.append)
        assert wheel.name == "tool-1.0-py3-none-any.whl"
        assert steps == []
    wheel.write_bytes(b"something else")
    (wheel,) = fetch(lock, "bookworm", cache, silent)
    assert wheel.read_bytes() == (packages / wheel.name).read_bytes()
    shutil.rmtree(cache)
    write_wheel(packages, "tool", files={"tool.py": "changed"})
    with pytest.raises(ImageBuildError, match="not the one that was locked"):
        fetch(lock, "bookworm", cache, silent)


def test_cached_wheel_for_another_architecture_is_not_used(packages: Path, cache: Path) -> None:
    """A home directory can be shared between machines."""
    wheel = write_wheel(packages, "tool", tag="cp311-cp311-manylinux_2_28_riscv64")
    digest = digest_of_file(wheel)
    (cache / digest).mkdir(parents=True)
    shutil.copy(wheel, cache / digest)
    with pytest.raises(ImageBuildError):
        fetch(Lock((Pinned("tool", "1.0", (digest,)),)), "bookworm", cache, silent)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("nosuch", "has no package 'nosuch'"),
        ("tool==9", r"No version of tool fits 'tool==9'"),
        ("left\nright", "do not fit together: left 1.0 depends on part==1"),
    ],
)
def test_unsatisfiable_requirement_is_reported_with_its_reason(
    packages: Path, cache: Path, asked: str, words: str
) -> None:
    write_wheel(packages, "tool")
    write_wheel(packages, "left", needs=["part==1"])
    write_wheel(packages, "right", needs=["part==2"])
    for version in ("1", "2"):
        write_wheel(packages, "part", version)
    with pytest.raises(ImageBuildError, match=words):
        resolve(f"{asked}\n", "bookworm", cache, silent)


def test_unreachable_index_is_reported_with_its_cure(
    packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(index, "PATIENCE", ("--timeout=1", "--retries=1"))
    with pytest.raises(ImageBuildError, match="cannot be reached") as error:
        resolve("tool\n", "bookworm", cache, silent)
    assert "proxy" in error.value.remedy


def test_unknown_debian_release_is_refused(packages: Path, cache: Path) -> None:
    with pytest.raises(ImageBuildError, match="The Python version of trixie is unknown"):
        resolve("tool\n", "trixie", cache, silent)


def test_missing_pip_is_reported_with_its_cure(
    packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_run", lambda *_: (1, "No module named pip"))
    with pytest.raises(ImageBuildError, match="ensurepip"):
        resolve("tool\n", "bookworm", cache, silent)


def test_hanging_pip_is_killed_at_its_deadline(
    packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "DEADLINE_S", 0.2)
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*arguments: object, **how: object) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    status, said = index._run(["sleep", "600"])
    assert (status != 0, "took longer" in said) == (True, True)
    assert started[0].returncode is not None


def test_source_distribution_is_refused_without_running_its_setup(
    packages: Path, cache: Path, tmp_path: Path
) -> None:
    """A source distribution would be built on the host by its own setup.py."""
    ran = tmp_path / "ran"
    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(ran)!r}, 'w')\n")
    shutil.make_archive(str(packages / "evil-1.0"), "gztar", tmp_path, "evil-1.0")
    with pytest.raises(ImageBuildError, match="evil has no wheel for this image"):
        resolve("evil\n", "bookworm", cache, silent)
    assert not ran.exists()
