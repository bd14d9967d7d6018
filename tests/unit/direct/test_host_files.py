"""The skeleton of the image `host`: what it takes from this host, and what it does not."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fumehood.direct import host_files, launcher
from fumehood.direct.host_files import PYTHON, python_version, write_skeleton
from fumehood.direct.store import DirectoryStore
from fumehood.docker.store import DockerStore
from fumehood.image_store.faults import ImageBuildError

pytestmark = pytest.mark.row("B13")

OF_HOST = {"alternatives", "fonts", "ld.so.conf.d", "ld.so.cache", "ld.so.conf", "localtime",
           "mime.types", "os-release", "services"}  # fmt: skip
OF_IMAGE = {"passwd", "group", "nsswitch.conf", "hostname", "gitconfig"}


def members(target: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(target) as archive:
        return {member.name: member for member in archive}


@pytest.fixture
def skeleton(tmp_path: Path) -> dict[str, tarfile.TarInfo]:
    write_skeleton(tmp_path / "root.tar")
    return members(tmp_path / "root.tar")


def test_skeleton_has_only_links_empty_folders_and_named_files(
    skeleton: dict[str, tarfile.TarInfo],
) -> None:
    of_etc = {name.split("/")[1] for name in skeleton if name.startswith("etc/")}
    assert OF_IMAGE <= of_etc <= OF_HOST | OF_IMAGE
    elsewhere = {name for name, one in skeleton.items() if one.isreg()} - {
        name for name in skeleton if name.startswith("etc/")
    }
    assert elsewhere == {"opt/fumehood/manifest.txt"}
    assert all(one.uid == one.gid == 0 for one in skeleton.values())
    assert all(one.isreg() or one.isdir() or one.issym() for one in skeleton.values())
    assert not any(one.mode & 0o6022 for one in skeleton.values() if not one.issym())


def test_folders_of_the_host_are_places_for_mounts_and_links_stay_links(
    skeleton: dict[str, tarfile.TarInfo],
) -> None:
    folders = launcher.host_folders()
    assert "/usr" in folders
    for path in launcher.HOST_FOLDERS:
        member = skeleton.get(path[1:])
        if Path(path).is_symlink():
            assert member is not None
            assert member.linkname == str(Path(path).readlink())
        else:
            assert (member is not None) == (path in folders)


@pytest.mark.parametrize(
    ("prepare", "is_in"),
    [
        (lambda path: path.chmod(0o644), True),
        (lambda path: path.chmod(0o640), False),  # not for everybody
        (lambda path: path.unlink(), False),
    ],
    ids=["readable", "secret", "absent"],
)
@pytest.mark.needs("root")
def test_file_that_not_everybody_may_read_is_left_out(
    prepare: Callable[[Path], None], is_in: bool, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    prepare(path)
    with tarfile.open(tmp_path / "out.tar", "w") as archive:
        host_files._add(archive, path)
    assert (str(path)[1:] in members(tmp_path / "out.tar")) == is_in


def test_host_without_a_suitable_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, tmp_path)
    assert python_version() >= (3, 11)
    store.root_from_host(tmp_path / "root.tar")  # the twin
    for wrong in ("/nonexistent/python3", "/bin/false"):
        monkeypatch.setattr(host_files, "PYTHON", wrong)
        with pytest.raises(ImageBuildError, match=f"needs {PYTHON} of version 3.11"):
            store.root_from_host(tmp_path / "other.tar")
        assert not (tmp_path / "other.tar").exists()


def test_docker_has_no_image_of_the_host(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match=r"container\.engine"):
        DockerStore(None).root_from_host(tmp_path / "root.tar")  # type: ignore[arg-type]
