"""What of a wheel comes into an image, and where."""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from fumehood.images import build, unpacking
from fumehood.images.index import PackagesRefused
from fumehood.images.unpacking import Refused, write_site
from support.wheels import write_wheel

SITE = "opt/fumehood/site"


def members(target: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(target) as archive:
        return {member.name: member for member in archive}


def content(target: Path, name: str) -> bytes:
    with tarfile.open(target) as archive:
        file = archive.extractfile(name)
        return file.read()


def unpack(wheels: list[Path], target: Path) -> None:
    with tarfile.open(target, "w") as archive:
        write_site(archive, wheels, SITE)


def test_wheel_is_unpacked_by_a_process_with_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path, "tool")
    build.unpack([wheel], SITE, tmp_path / "site.tar", 60)
    assert f"{SITE}/tool.py" in members(tmp_path / "site.tar")
    bad = write_wheel(tmp_path, "bad", files={"/etc/passwd": "x"})
    with pytest.raises(PackagesRefused, match="not a file below its own folder"):
        build.unpack([wheel, bad], SITE, tmp_path / "site.tar", 60)
    many = tmp_path / "many-1.0-py3-none-any.whl"
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(30_000):
            archive.writestr(f"{number:0200}", "")
    with pytest.raises(PackagesRefused, match="within the limits"):
        build.unpack([many] * 20, SITE, tmp_path / "site.tar", 0.5)


def test_installed_packages_are_owned_by_root_and_read_only(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "tool", files={"tool_data/deep/x.txt": "x"})
    unpack([wheel], tmp_path / "site.tar")
    found = members(tmp_path / "site.tar")
    assert content(tmp_path / "site.tar", f"{SITE}/tool.py") == b"VERSION = '1.0'\n"
    assert {(m.uid, m.gid) for m in found.values()} == {(0, 0)}
    assert {m.mode for m in found.values() if m.isfile()} == {0o644}
    assert {m.name for m in found.values() if m.isdir()} == {
        SITE, f"{SITE}/tool_data", f"{SITE}/tool_data/deep", f"{SITE}/tool-1.0.dist-info",
    }  # fmt: skip
    assert {m.mode for m in found.values() if m.isdir()} == {0o755}


def test_wheel_scripts_and_headers_are_left_out_of_the_image(tmp_path: Path) -> None:
    data = "tool-1.0.data"
    wheel = write_wheel(
        tmp_path, "tool",
        files={f"{data}/scripts/run": "x", f"{data}/headers/a.h": "x", f"{data}/data/etc/a": "x",
               f"{data}/platlib/native.so": "x", f"{data}/purelib/pure/a.py": "x"},
    )  # fmt: skip
    unpack([wheel], tmp_path / "site.tar")
    names = members(tmp_path / "site.tar").keys()
    assert {f"{SITE}/native.so", f"{SITE}/pure/a.py"} <= names
    assert not [name for name in names if "data" in name or name.endswith(("/run", "a.h", "etc/a"))]


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/cron.d/x",
        "/etc/passwd",
        "a/../../x",
        "a\\..\\x",
        "tool.data/purelib/../x",
        ".",
    ],
)
def test_wheel_whose_file_would_leave_its_directory_is_refused(tmp_path: Path, path: str) -> None:
    wheel = write_wheel(tmp_path, "tool", files={path: "x"})
    with pytest.raises(Refused, match="not a file below its own folder"):
        unpack([wheel], tmp_path / "site.tar")


def wheel_with(tmp_path: Path, name: str, mode: int) -> Path:
    """A wheel with a member that has this mode."""
    wheel = write_wheel(tmp_path, "tool")
    with zipfile.ZipFile(wheel, "a") as archive:
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        archive.writestr(member, "/etc/passwd")
    return wheel


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_link_and_special_file_are_refused(tmp_path: Path, kind: int) -> None:
    with pytest.raises(Refused, match="'link'"):
        unpack([wheel_with(tmp_path, "link", kind | 0o777)], tmp_path / "site.tar")


def test_file_modes_of_a_wheel_are_not_copied_to_the_image(tmp_path: Path) -> None:
    unpack([wheel_with(tmp_path, "su", stat.S_IFREG | 0o6777)], tmp_path / "site.tar")
    assert members(tmp_path / "site.tar")[f"{SITE}/su"].mode == 0o644


def test_wheels_over_the_unpacked_size_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path, "tool", files={"big": "x" * 1000})
    unpack([wheel], tmp_path / "site.tar")
    monkeypatch.setattr(unpacking, "MAX_SITE_BYTES", 1000)
    with pytest.raises(Refused, match="unpack to more than"):
        unpack([wheel], tmp_path / "site.tar")


def test_malformed_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"not a zip file")
    with pytest.raises(Refused, match="cannot be unpacked"):
        unpack([tmp_path / "a-1-py3-none-any.whl"], tmp_path / "site.tar")


def test_wheel_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "tool", files={"bomb": "x" * 100_000})
    content = wheel.read_bytes()
    said, lie = struct.pack("<I", 100_000), struct.pack("<I", 10)
    assert said in content
    wheel.write_bytes(content.replace(said, lie))
    with pytest.raises(Refused, match="cannot be unpacked"):
        unpack([wheel], tmp_path / "site.tar")
