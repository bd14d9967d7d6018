"""Builds of images, and the image `python` in Docker: complete, without setuid files."""

from __future__ import annotations

import json
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import ImageNotFound

from fumehood.docker import store as docker_store
from fumehood.docker.api import DockerError, open_docker
from fumehood.docker.store import DEADLINE_S, DockerStore
from fumehood.image_store.faults import ImageBuildError
from fumehood.image_store.find import list_images
from fumehood.images import build
from fumehood.images.build import Built, build_image
from fumehood.sandbox.images import recipe
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import guest_files, images_folder, read_recipe
from support.docker_images import run_inside, write_whole
from support.registry import serving
from support.wait import wait_until

pytestmark = pytest.mark.needs("docker")

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c")

NOT_IN_THE_IMAGE = {
    # need a display, or install packages
    "_tkinter", "tkinter", "turtle", "turtledemo", "idlelib", "ensurepip",
    # other systems'
    "_msi", "_overlapped", "_winapi", "msilib", "msvcrt", "nt", "winreg", "winsound", "_scproxy",
    "_winreg", "nturl2path_nt",
}  # fmt: skip
NOT_IMPORTED = {"antigravity", "this", "__main__"}
"""Modules not imported, because they open a browser, print text, or are the program itself."""


@pytest.fixture
def client() -> Iterator[docker.APIClient]:
    with closing(open_docker(timeout_s=DEADLINE_S)) as opened:
        yield opened


@pytest.fixture
def other(
    client: docker.APIClient, python_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Another image with its own empty root file system, removed afterwards."""
    name = f"test-{tmp_path.name.replace('_', '-')[-12:].strip('-').lower()}"
    folder = tmp_path / "images"
    shutil.copytree(images_folder() / "python", folder / name)
    shutil.copytree(images_folder() / "common", folder / "common")
    below = read_recipe("python").root_digest
    with (folder / "common" / "finish").open("a", encoding="utf-8") as finish:
        finish.write(f"# {name}\n")
    monkeypatch.setattr(recipe, "images_folder", lambda: folder)
    own_root = read_recipe(name).root_digest
    root = client.images(name="fumehood/root", filters={"label": f"fumehood.root={below}"})[0]
    container = client.create_container(root["Id"], command=["true"])["Id"]
    client.commit(
        container, repository="fumehood/root", tag=own_root[:12],
        changes=[f"LABEL fumehood.root={own_root}"],
    )  # fmt: skip
    client.remove_container(container)
    yield name
    for filters in ({"reference": f"fumehood/{name}"}, {"reference": f"fumehood/base-{name}"},
                    {"label": f"fumehood.root={own_root}"}):  # fmt: skip
        remove_all(client, filters)


def remove_all(client: docker.APIClient, filters: dict[str, str]) -> None:
    for row in client.images(filters=filters):
        client.remove_image(row["Id"], force=True)


def built(client: docker.APIClient, name: str, **how: Any) -> Built:
    return build_image(DockerStore(client), read_recipe(name), lambda _: None, **how)


def change_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate another version of the engine."""
    files = (*guest_files(), ("guest/zz_new.py", b"NEW = True\n"))
    for module in ("sandbox.images.recipe", "images.archive"):
        monkeypatch.setattr(f"fumehood.{module}.guest_files", lambda: files)
    digest = recipe.guest_digest.__wrapped__()
    for module in ("images.build", "images.removal", "sandbox.images.catalog"):
        monkeypatch.setattr(f"fumehood.{module}.guest_digest", lambda: digest)


@pytest.mark.row("S10")
def test_second_build_is_a_no_op(client: docker.APIClient, python_image: Image) -> None:
    steps: list[str] = []
    again = build_image(DockerStore(client), read_recipe("python"), steps.append)
    assert again == Built(again.image, made_base=False, made_guest=False)
    assert again.image.id == python_image.id
    assert steps == []


@pytest.mark.row("S10")
def test_changed_guest_rebuilds_only_the_top_layer(
    client: docker.APIClient, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "make_root", lambda *_: pytest.fail("the base was made anew"))
    before = built(client, other)
    change_guest(monkeypatch)
    after = built(client, other)
    assert (before.made_base, before.made_guest) == (after.made_base, after.made_guest)
    assert (after.made_base, after.made_guest) == (False, True)
    assert after.image.guest != before.image.guest
    of_each = [client.inspect_image(each.image.id)["RootFS"]["Layers"] for each in (before, after)]
    assert of_each[0][:-1] == of_each[1][:-1]
    assert of_each[0][-1] != of_each[1][-1]
    status, said = run_inside(after.image.id, "cat", "/opt/fumehood/fumehood/guest/zz_new.py")
    assert (status, said) == (0, "NEW = True\n")


def test_changed_recipe_rebuilds_the_base_and_failure_keeps_the_old_image(
    client: docker.APIClient, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that fails, the previous image remains and nothing is left over."""
    first = built(client, other).image

    def fail(*_: object) -> None:
        raise ImageBuildError("The mirror is away.", "Wait.")

    monkeypatch.setattr(build, "make_root", fail)
    folder = recipe.images_folder() / other
    (folder / "packages.txt").write_text("python3\ntzdata\n", encoding="utf-8")
    assert not first.is_own
    with pytest.raises(ImageBuildError, match="mirror"):
        built(client, other)
    assert [image.id for image in list_images(DockerStore(client), other)] == [first.id]
    wait_until(lambda: client.containers(all=True, filters={"name": docker_store.BUILDER}) == [])


def test_guest_with_syntax_error_fails_the_build_and_leaves_no_image(
    client: docker.APIClient, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (*guest_files(), ("guest/broken.py", b"def\n"))
    monkeypatch.setattr("fumehood.images.archive.guest_files", lambda: files)
    with pytest.raises(ImageBuildError, match="does not compile"):
        built(client, other)
    assert list_images(DockerStore(client), other) == []
    wait_until(lambda: client.containers(all=True, filters={"name": docker_store.BUILDER}) == [])


def test_forced_build_removes_the_image_that_it_replaces(
    client: docker.APIClient, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built(client, other).image
    base = build.find_base(DockerStore(client), read_recipe(other))
    monkeypatch.setattr(build, "make_base", lambda *_: base)
    second = built(client, other, force=True)
    assert (second.made_base, second.made_guest) == (True, True)
    assert [image.id for image in list_images(DockerStore(client), other)] == [second.image.id]
    with pytest.raises(ImageNotFound):
        client.inspect_image(first.id)


def test_insufficient_disk_space_fails_the_build_before_it_starts(
    client: docker.APIClient, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "NEEDED_BYTES", 1 << 60)
    monkeypatch.setattr(build, "make_root", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(ImageBuildError, match="no disk space"):
        built(client, other, force=True)


@pytest.mark.row("S10")
def test_image_from_a_named_base_has_one_base_layer_and_one_guest_layer(
    client: docker.APIClient, other: str, python_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base already has all packages, so no network is needed."""
    monkeypatch.setattr(docker_store, "PACKAGES_NETWORK", "none")
    with serving(client, python_image.id) as base:
        try:
            made = build_image(DockerStore(client), read_recipe(other, base=base), lambda _: None)
        finally:
            client.remove_image(base)
    assert made.made_base
    assert (made.image.base, made.image.is_own) == (base, True)
    # One layer of the base, one of the guest, whatever the base was made of.
    assert len(client.inspect_image(made.image.id)["RootFS"]["Layers"]) == 2
    assert run_inside(made.image.id, *PYTHON, "print(1 + 1)") == (0, "2\n")
    remove_all(client, {"reference": f"fumehood/{other}"})
    remove_all(client, {"label": f"fumehood.root={read_recipe(other, base=base).root_digest}"})


def test_unreachable_base_image_fails_the_build(client: docker.APIClient, other: str) -> None:
    base = f"127.0.0.1:9/base@sha256:{'0' * 64}"
    with pytest.raises(ImageBuildError, match="cannot be fetched"):
        build_image(DockerStore(client), read_recipe(other, base=base), lambda _: None)
    assert list_images(DockerStore(client), other) == []


def lends_rights(member: tarfile.TarInfo) -> bool:
    """Whether the file is setuid, setgid or has capabilities."""
    has_bits = not member.issym() and member.mode & (stat.S_ISUID | stat.S_ISGID) != 0
    return has_bits or any("security.capability" in name for name in member.pax_headers)


@pytest.mark.row("S3")
def test_no_file_of_the_image_is_setuid_or_world_writable(
    client: docker.APIClient, python_image: Image, tmp_path: Path
) -> None:
    write_whole(client, python_image.id, tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar") as archive:
        members = {member.name.removeprefix("./"): member for member in archive}
        hostname = archive.extractfile(members["etc/hostname"])
        assert hostname.read() in (b"sandbox\n", b""), "the builder's name"
    assert len(members) > 3000
    assert [name for name, member in members.items() if lends_rights(member)] == []
    # The control: the same look finds one where there is one.
    planted = replace_mode(members["usr/bin/python3.11"], 0o4755)
    assert lends_rights(planted)
    ours = {name: member for name, member in members.items() if name.startswith("opt/")}
    assert any(name.endswith("guest/__main__.py") for name in ours)
    assert {(member.uid, member.gid) for member in ours.values()} == {(0, 0)}
    open_to_others = {
        name
        for name, member in members.items()
        if member.mode & 0o022 and not member.issym() and not name.startswith("dev/")
    }
    # The root is read-only where it runs; on the first two a file system in memory is mounted.
    assert {name.rstrip("/") for name in open_to_others} <= {
        "workspace",
        "tmp",
        "var/tmp",
        "run/lock",
        "var/local",
        "var/mail",
    }


def replace_mode(member: tarfile.TarInfo, mode: int) -> tarfile.TarInfo:
    planted = tarfile.TarInfo(member.name)
    planted.mode = mode
    return planted


@pytest.mark.row("S7", "S10")
def test_standard_library_is_importable_except_listed_modules(python_image: Image) -> None:
    program = (
        "import importlib, json, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "failed = {}\n"
        f"for name in sorted(sys.stdlib_module_names - {NOT_IMPORTED!r}):\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        failed[name] = str(error)\n"
        "print(json.dumps([len(sys.stdlib_module_names), failed]))"
    )
    status, said = run_inside(python_image.id, *PYTHON, program)
    assert status == 0, said
    tried, failed = json.loads(said)
    assert tried > 250
    assert not failed.keys() - NOT_IN_THE_IMAGE, failed
    assert {"tkinter", "winreg"} <= failed.keys(), "the list says what is not there"


@pytest.mark.row("S5")
def test_every_python_module_has_timestamp_independent_bytecode(python_image: Image) -> None:
    """A read-only file system cannot cache bytecode later; layer timestamps do not matter."""
    program = (
        "import importlib.util as u, json, os\n"
        "seen, stale = 0, []\n"
        "for top in ('/usr/lib/python3.11', '/opt/fumehood/fumehood'):\n"
        "    for folder, _, files in os.walk(top):\n"
        "        for file in files:\n"
        "            if file.endswith('.py'):\n"
        "                seen += 1\n"
        "                cached = u.cache_from_source(os.path.join(folder, file))\n"
        "                ok = os.path.exists(cached) and open(cached, 'rb').read(8)[4:] == b'\\1\\0\\0\\0'\n"
        "                if not ok: stale.append(cached)\n"
        "print(json.dumps([seen, stale]))"
    )
    status, said = run_inside(python_image.id, *PYTHON, program)
    assert status == 0, said
    seen, stale = json.loads(said)
    assert seen > 500
    assert stale == []


def test_image_has_sandbox_user_time_zones_and_mount_points(python_image: Image) -> None:
    program = (
        "import datetime, grp, os, pwd, zoneinfo\n"
        "user = pwd.getpwuid(10001)\n"
        "zone = zoneinfo.ZoneInfo('Europe/Berlin')\n"
        "print(user.pw_name, user.pw_dir, user.pw_shell, grp.getgrgid(10001).gr_name)\n"
        "print(datetime.datetime(2026, 7, 1, tzinfo=zone).utcoffset())\n"
        "print(os.getcwd(), [os.path.isdir(p) for p in ('/workspace', '/tmp', '/dev/shm')])"
    )
    status, said = run_inside(python_image.id, *PYTHON, program)
    assert status == 0, said
    assert said.splitlines() == [
        "sandbox /workspace /usr/sbin/nologin sandbox",
        "2:00:00",
        "/workspace [True, True, True]",
    ]


def test_manifest_names_every_package_with_its_version(python_image: Image) -> None:
    status, said = run_inside(python_image.id, "cat", "/opt/fumehood/manifest.txt")
    assert status == 0
    packages = dict(line.split() for line in said.splitlines())
    assert len(packages) == python_image.packages
    assert packages.keys() >= set(read_recipe("python").packages)
    assert not {"gcc", "python3-pip", "perl"} & packages.keys()


def test_image_is_saved_to_a_file_and_an_invalid_file_is_refused(
    client: docker.APIClient, python_image: Image, tmp_path: Path
) -> None:
    store, file = DockerStore(client), tmp_path / "image.tar"
    with file.open("wb") as opened:
        store.save(python_image.id, opened)
    with tarfile.open(file) as archive:
        assert "manifest.json" in archive.getnames()
    with file.open("rb") as opened:
        store.load(opened)  # nothing is new in it
    assert python_image.id in {one.id for one in list_images(store, "python")}
    (tmp_path / "wrong.tar").write_bytes(b"no archive" * 1000)
    with (tmp_path / "wrong.tar").open("rb") as opened, pytest.raises(DockerError):
        store.load(opened)
