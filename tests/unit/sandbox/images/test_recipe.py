"""What decides an image, and what does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fumehood.sandbox.images import recipe as recipes
from fumehood.sandbox.images.recipe import (
    UnknownImage,
    WrongRecipe,
    guest_files,
    image_names,
    read_recipe,
)
from support.docker_images import write_image_folder

DIGEST = "sha256:" + "a" * 64


def test_every_built_in_image_has_what_its_guest_needs() -> None:
    found = {name: read_recipe(name) for name in image_names()}
    assert found.keys() == {"host", "python", "python-data", "python-science", "shell", "node"}
    for recipe in found.values():
        assert recipe.is_of_host or "python3" in recipe.packages
        assert not any(name.startswith(("#", "python3-pip", "gcc")) for name in recipe.packages)
        assert {"python", "shell"} <= set(recipe.settings.languages)
    assert "javascript" in found["node"].settings.languages


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('langauges = ["python"]', "langauges: Extra inputs"),
        ("languages = 3", "languages: Input should be a valid tuple"),
        ('languages = ["python", 3]', "languages.1: Input should be a valid string"),
        ('languages = ["python", "perl"]', "languages.1: is not a language"),
        ("guest_mb = true", "guest_mb: Input should be a valid integer"),
        ('guest_mb = "64"', "guest_mb: Input should be a valid integer"),
        ("guest_mb = 31", "greater than or equal to 32"),
        ('preload = "numpy"', "preload: Input should be a valid tuple"),
        ("preload = [", "not TOML"),
        ('release = "x y"', "not TOML"),
    ],
)
def test_unknown_image_settings_are_refused(tmp_path: Path, line: str, words: str) -> None:
    folder = write_image_folder(
        tmp_path, image=f'release = "bookworm"\ndescription = "x"\n{line}\n'
    )
    with pytest.raises(WrongRecipe, match=re.escape(words)):
        read_recipe("python", folder=folder)


@pytest.mark.parametrize(
    "text", ['release = "bookworm"\n', 'description = "x"\n', 'release = 3\ndescription = "x"\n',
             'release = "--x"\ndescription = "x"\n', 'release = "bookworm"\ndescription = "a\\nb"\n']
)  # fmt: skip
def test_image_release_and_description_are_required(tmp_path: Path, text: str) -> None:
    with pytest.raises(WrongRecipe, match=r"image\.toml of the image python"):
        read_recipe("python", folder=write_image_folder(tmp_path, image=text))


@pytest.mark.parametrize(
    ("stem", "text", "is_of_root"),
    [
        ("packages", "python3\ntzdata\n", True),
        ("requirements", "# other words\n", False),
        ("image", 'release = "trixie"\ndescription = "x"\n', True),
        ("finish", "false\n", True),
    ],
)
def test_every_file_of_the_image_directory_changes_its_digest(
    tmp_path: Path, stem: str, text: str, is_of_root: bool
) -> None:
    before = read_recipe("python", folder=write_image_folder(tmp_path / "a"))
    same = read_recipe("python", folder=write_image_folder(tmp_path / "b"))
    other = read_recipe("python", folder=write_image_folder(tmp_path / "c", **{stem: text}))
    assert before.digest == same.digest != other.digest
    assert (before.root_digest != other.root_digest) is is_of_root


@pytest.mark.parametrize(
    "base",
    ["debian", "debian:bookworm", "debian@sha256:abc", f"{DIGEST}", f"-x@{DIGEST}", f"a b@{DIGEST}",
     f"debian@{DIGEST}\n"],
)  # fmt: skip
def test_a_base_without_a_digest_is_refused(base: str) -> None:
    with pytest.raises(WrongRecipe):
        read_recipe("python", base=base)


@pytest.mark.parametrize("name", ["nosuch", "", "..", "../python", "python/", "Python", "."])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownImage, match="Known: host, node, python, "):
        read_recipe(name)


@pytest.mark.parametrize(
    "line", ["numpy==2.0", "numpy==2.0 --hash=sha256:00", "numpy", "-r other.txt"]
)
def test_locked_package_without_a_hash_is_refused(tmp_path: Path, line: str) -> None:
    folder = write_image_folder(tmp_path, requirements=f"{line}\n")
    with pytest.raises(WrongRecipe, match=r"requirements\.lock of the image python"):
        read_recipe("python", folder=folder)


def own_folder(home: Path, name: str = "mine") -> Path:
    folder = home / name
    folder.mkdir(parents=True)
    for file, text in {
        "image.toml": 'release = "bookworm"\ndescription = "x"\n', "packages.txt": "python3\n",
        "requirements.in": "", "requirements.lock": "",
    }.items():  # fmt: skip
        (folder / file).write_text(text, encoding="utf-8")
        (folder / file).chmod(0o644)
    folder.chmod(0o755)
    return folder


def test_own_image_is_read_with_the_shared_files(tmp_path: Path) -> None:
    own_folder(tmp_path)
    assert image_names(own=tmp_path) == [
        "host", "mine", "node", "python", "python-data", "python-science", "shell",
    ]  # fmt: skip
    recipe = read_recipe("mine", own=tmp_path)
    assert recipe.packages == ("python3",)
    assert recipe.file("finish") == read_recipe("python").file("finish")
    with pytest.raises(UnknownImage):
        read_recipe("mine")


def test_own_image_directory_cannot_run_code_during_the_build(tmp_path: Path) -> None:
    """What `finish` says is run by root."""
    (own_folder(tmp_path) / "finish").write_text("echo here", encoding="utf-8")
    assert read_recipe("mine", own=tmp_path).file("finish") == read_recipe("python").file("finish")


def test_own_image_cannot_shadow_a_built_in_image(tmp_path: Path) -> None:
    own_folder(tmp_path, "python")
    assert read_recipe("python", own=tmp_path) == read_recipe("python")


@pytest.mark.parametrize("what", ["folder", "image.toml", "requirements.lock"])
def test_own_image_writable_by_others_is_refused(tmp_path: Path, what: str) -> None:
    folder = own_folder(tmp_path)
    assert read_recipe("mine", own=tmp_path)
    target = folder if what == "folder" else folder / what
    target.chmod(0o775 if what == "folder" else 0o664)
    with pytest.raises(WrongRecipe, match="can be written by others"):
        read_recipe("mine", own=tmp_path)


def test_own_image_with_a_link_or_without_a_file_is_refused(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    (folder / "packages.txt").rename(tmp_path / "elsewhere")
    with pytest.raises(WrongRecipe, match=r"packages\.txt cannot be read"):
        read_recipe("mine", own=tmp_path)
    (folder / "packages.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WrongRecipe, match="symbolic link"):
        read_recipe("mine", own=tmp_path)


@pytest.mark.parametrize("package", ["--allow-x", "a,b", "a b", "A", "x;rm", "$(x)"])
def test_invalid_debian_package_name_is_refused(tmp_path: Path, package: str) -> None:
    """They become part of a command line."""
    folder = write_image_folder(tmp_path, packages=f"python3\n{package}\n")
    with pytest.raises(WrongRecipe, match="not the name"):
        read_recipe("python", folder=folder)


def test_guest_archive_has_the_guest_files_only() -> None:
    paths = [path for path, _ in guest_files()]
    assert paths == sorted(paths)
    outside = {path for path in paths if not path.startswith("guest/")}
    assert outside == {
        "__init__.py", "protocol/__init__.py", "protocol/connections.py", "protocol/framing.py",
        "protocol/streams.py", "protocol/strict_json.py",
    }  # fmt: skip
    assert "guest/__main__.py" in paths
    assert not any("__pycache__" in path for path in paths)


def test_image_of_the_host_is_another_one_after_an_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_bytes(b"one")
    monkeypatch.setattr(recipes, "HOST_PYTHON", python)
    before = read_recipe("host")
    assert read_recipe("host").digest == before.digest  # the twin
    python.write_bytes(b"other")
    after = read_recipe("host")
    assert after.digest != before.digest
    assert after.root_digest != before.root_digest
    assert read_recipe("python").root_digest != after.root_digest
    python.unlink()
    with pytest.raises(WrongRecipe, match="This host has no"):
        read_recipe("host")


def test_own_image_cannot_have_the_programs_of_the_host(tmp_path: Path) -> None:
    own_folder(tmp_path)
    settings = tmp_path / "mine" / "image.toml"
    settings.write_text(settings.read_text() + 'root = "host"\n')
    with pytest.raises(WrongRecipe, match="Only the image host"):
        read_recipe("mine", own=tmp_path)
