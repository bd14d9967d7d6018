"""The sources of an image: its folder (built-in or the operator's), its settings, its list of
locked packages, and the guest's files.

Host side; only reads files. Invariants: the digests of recipe and guest cover everything that
determines an image's content, so an image whose labels contain both digests needs no further check.
An operator's own files are read only if they and their folders belong to root or to this user: root
installs the packages that these files name, so the files are as trusted as the configuration. An
operator's files are never run during a build. An unknown key in `image.toml` is refused, so that a
misspelling never leads to an incomplete image.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fumehood.core.languages import LANGUAGES
from fumehood.core.names import IMAGE_NAME
from fumehood.protocol.strict_json import decoded
from fumehood.sandbox.settings import GUEST_MB
from fumehood.sandbox.trusted_files import Untrusted, open_directory, read_file

PACKAGE = Path(__file__).parents[2]
"""The folder of the package `fumehood`."""

GUEST_HOME = "opt/fumehood/fumehood"
"""Path of the guest's folder in an image."""

ABOUT = "opt/fumehood/image.json"
"""Path of the image's description, which its guest reads."""

SITE = "opt/fumehood/site"
"""Path of the folder of Python packages in an image."""

ENVIRONMENT = {
    # A container has the CPU time of about one processor, and the zygote, which preloads modules
    # and forks, must not have threads.
    "numpy": {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    # There is no display, and Matplotlib warns if its configuration directory is not writable.
    "matplotlib": {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp/.matplotlib"},  # noqa: S108
    # pandas imports pyarrow, whose allocator would start a thread.
    "pyarrow": {"JE_ARROW_MALLOC_CONF": "background_thread:false"},
}
"""Python package → environment variables for programs in images with this package."""

HOST_IMAGE = "host"
"""Name of the image with the programs and libraries of its host."""

HOST_PYTHON = Path("/usr/bin/python3")
"""The Python of the image `host`, and of this host."""

COMMON = "common"
"""Name of the folder of files that all images share."""

OWN_FILES = ("image.toml", "packages.txt", "requirements.in", "requirements.lock")
"""The files of an operator's own image."""

_PROTOCOL = ("__init__.py", "connections.py", "framing.py", "streams.py", "strict_json.py")
_IMAGE_NAME = re.compile(IMAGE_NAME)
_DEBIAN_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
"""*Source*: Debian policy 5.6.1."""

_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}")


class UnknownImage(Exception):
    """No recipe has the name of the requested image."""


class WrongRecipe(Exception):
    """The recipe of an image, or the requested base image, is invalid."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources from which an image is built. `files` contains pairs of a file's name and its
    content.
    """

    name: str
    settings: ImageSettings
    packages: tuple[str, ...]
    lock: Lock
    files: tuple[tuple[str, bytes], ...]
    base: str = ""
    """The existing image to start from, with its digest, or empty to build a root file system."""

    @property
    def digest(self) -> str:
        """The SHA-256 over everything that the recipe contains, as hexadecimal digits."""
        return _digest((("base", self.base.encode()), ("about", self.about), *self.files))

    @property
    def root_digest(self) -> str:
        """The SHA-256 over the sources of the root file system, as hexadecimal digits. Images with
        the same digest share one root file system.
        """
        packages = "\n".join(sorted(self.packages)).encode()
        parts = [("base", self.base.encode()), ("release", self.release.encode())]
        parts += [("packages", packages), ("finish", self.file("finish"))]
        parts += [("host", self.file("host"))] if self.is_of_host else []
        parts += [("Dockerfile", self.file("Dockerfile"))] if self.base else []
        return _digest(tuple(parts))

    @property
    def release(self) -> str:
        """The name of the image's Debian release."""
        return self.settings.release

    @property
    def is_of_host(self) -> bool:
        """Whether the image has the programs and libraries of this host."""
        return self.settings.root == "host"

    @property
    def about(self) -> bytes:
        """The description of the image that its guest reads, as the content of a JSON file."""
        document = {
            "name": self.name,
            "languages": list(self.settings.languages),
            "preload": list(self.settings.preload),
            "site_paths": [f"/{SITE}"] if self.lock.packages else [],
            "environment": self._environment(),
        }
        return json.dumps(document, sort_keys=True).encode()

    def _environment(self) -> dict[str, str]:
        chosen: dict[str, str] = {}
        for package in self.lock.packages:
            chosen |= ENVIRONMENT.get(package.name, {})
        return chosen

    def file(self, name: str) -> bytes:
        """Return the content of the recipe's file with this name.

        Raises:
            WrongRecipe: the file is missing.
        """
        return _content(self.name, self.files, name)


def images_folder() -> Path:
    """Return the folder of the built-in recipes, `sandbox_images`, in the installed package or in
    the checkout.
    """
    installed = PACKAGE / "sandbox_images"
    return installed if installed.is_dir() else PACKAGE.parents[1] / "sandbox_images"


def image_names(folder: Path | None = None, *, own: Path | None = None) -> list[str]:
    """Return the names of all recipes: the built-in recipes, and those in the operator's folder
    `own`.
    """
    ours = {file.parent.name for file in (folder or images_folder()).glob("*/image.toml")}
    theirs = set() if own is None else {file.parent.name for file in own.glob("*/image.toml")}
    return sorted(ours | {name for name in theirs if _IMAGE_NAME.fullmatch(name)})


def read_recipe(
    name: str, *, base: str = "", folder: Path | None = None, own: Path | None = None
) -> Recipe:
    """Read the recipe of the image `name`. If a built-in recipe and a recipe of the operator have
    the same name, the built-in recipe is read.

    `folder` replaces the folder of the built-in recipes, and `own` is the folder of the operator's
    recipes. `base` is an existing image to start from, as `REF@sha256:DIGEST`; if it is empty, a
    root file system is built.

    Raises:
        UnknownImage: no recipe has this name.
        WrongRecipe: the recipe's files or `base` are invalid.
    """
    if not _IMAGE_NAME.fullmatch(name) or name not in image_names(folder, own=own):
        known = ", ".join(image_names(folder, own=own)) or "none"
        raise UnknownImage(f"There is no image {name!r}. Known: {known}.")
    if own is not None and name not in image_names(folder):
        try:
            return recipe_of(name, read_own_files(own / name), base=base)
        except Untrusted as error:
            raise WrongRecipe(f"The image {name} in {own} is refused: {error}.") from None
    home = (folder or images_folder()) / name
    files = tuple(
        (path.relative_to(home).as_posix(), path.read_bytes())
        for path in sorted(home.rglob("*"))
        if path.is_file()
    )
    return recipe_of(name, files, base=base)


def recipe_of(name: str, files: tuple[tuple[str, bytes], ...], *, base: str = "") -> Recipe:
    """Create the recipe of an image from its files, which are pairs of name and content. `base` is
    an existing image to start from, as `REF@sha256:DIGEST`; if it is empty, a root file system is
    built.

    Raises:
        WrongRecipe: the files or `base` are invalid.
    """
    if base and not _BASE.fullmatch(base):
        raise WrongRecipe(
            "--base takes REF@sha256:DIGEST: a name alone can mean another image tomorrow."
        )
    files = (*_common_files({path for path, _ in files}), *files)
    settings = _settings(name, _text(name, files, "image.toml"))
    try:
        lock = parse_lock(_text(name, files, "requirements.lock"))
    except WrongRequirements as error:
        raise WrongRecipe(f"requirements.lock of the image {name}: {error}") from None
    if settings.root == "host":
        if name != HOST_IMAGE:
            raise WrongRecipe(f"Only the image {HOST_IMAGE} can have the programs of this host.")
        files = (*files, ("host", _host_identity()))
    packages = listed(_text(name, files, "packages.txt"))
    for package in packages:
        if not is_debian_package(package):
            raise WrongRecipe(f"{package[:80]!r} in packages.txt is not the name of a package.")
    return Recipe(name, settings, packages, lock, files, base)


def _host_identity() -> bytes:
    """Return a text that changes if the system or the Python of this host is upgraded, because the
    guest is compiled for this Python.

    Raises:
        WrongRecipe: this host has no Python of its own.
    """
    system = ""
    with suppress(OSError):
        system = Path("/etc/os-release").read_text(encoding="utf-8", errors="replace")
    try:
        found = HOST_PYTHON.stat()
    except OSError:
        raise WrongRecipe(f"This host has no {HOST_PYTHON}.") from None
    return f"{system}{found.st_size} {found.st_mtime_ns} {os.uname().machine}".encode()


def is_debian_package(name: str) -> bool:
    """Whether a text is a valid name for a Debian package."""
    return _DEBIAN_PACKAGE.fullmatch(name) is not None


def _content(name: str, files: tuple[tuple[str, bytes], ...], wanted: str) -> bytes:
    content = dict(files).get(wanted)
    if content is None:
        raise WrongRecipe(f"The image {name} lacks its file {wanted}.")
    return content


def _text(name: str, files: tuple[tuple[str, bytes], ...], wanted: str) -> str:
    try:
        return decoded(_content(name, files, wanted))
    except UnicodeDecodeError:
        raise WrongRecipe(f"{wanted} of the image {name} is not UTF-8.") from None


def _common_files(known: set[str]) -> tuple[tuple[str, bytes], ...]:
    """Return the files that all images share, as pairs of name and content. Files whose names are
    in `known` are left out, because the image's own files replace them.
    """
    found = sorted((images_folder() / COMMON).glob("*"))
    return tuple((path.name, path.read_bytes()) for path in found if path.name not in known)


@cache
def guest_digest() -> str:
    """Return the SHA-256 over the files of this engine's guest. The result is in hexadecimal
    digits.
    """
    return _digest(guest_files())


def guest_files(package: Path = PACKAGE) -> tuple[tuple[str, bytes], ...]:
    """Return the guest's files as pairs of path and content, sorted by path. The paths are relative
    to the package.
    """
    found = [package / "__init__.py", *(package / "protocol" / name for name in _PROTOCOL)]
    found += (path for path in (package / "guest").rglob("*") if path.suffix in (".py", ".js"))
    pairs = [(path.relative_to(package).as_posix(), path.read_bytes()) for path in found]
    return tuple(sorted(pairs))


def listed(text: str) -> tuple[str, ...]:
    """Return the lines of a text without comments and blank lines."""
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def _digest(pairs: tuple[tuple[str, bytes], ...]) -> str:
    """Return the SHA-256 over pairs of name and content, as hexadecimal digits. The hash includes
    the lengths of names and contents, so that no two lists have the same hash.
    """
    total = hashlib.sha256()
    for name, content in pairs:
        for part in (name.encode(), content):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


# -- files of the operator's own images ----------------------------------------------------


def read_own_files(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """Read the files of an operator's own image. Return pairs of a file's name and its content,
    sorted by name.

    Raises:
        Untrusted: another user could have written a file, or a file is missing.
    """
    owners = frozenset({0, os.geteuid()})
    directory = open_directory(folder, owners)
    try:
        return tuple((name, _read_own_file(directory, name, owners)) for name in OWN_FILES)
    finally:
        os.close(directory)


def _read_own_file(directory: int, name: str, owners: frozenset[int]) -> bytes:
    try:
        return read_file(directory, name, owners)[0]
    except Untrusted as error:
        raise Untrusted(f"{name}: {error}") from None
    except OSError as error:
        raise Untrusted(f"{name} cannot be read: {error.strerror}") from None


def _language(name: str) -> str:
    if name not in LANGUAGES:
        raise ValueError(f"is not a language: {', '.join(LANGUAGES)}")
    return name


class ImageSettings(BaseModel):
    """The settings in an image's file `image.toml`, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    root: Literal["debian", "host"] = "debian"
    """The source of the root file system: packages of Debian, or the files of this host."""
    release: str = Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")
    description: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")
    languages: Annotated[
        tuple[Annotated[str, AfterValidator(_language)], ...],
        Field(strict=False),
    ] = ("python", "shell")
    preload: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules that the guest imports once, before any program runs."""
    guest_mb: int = Field(default=GUEST_MB, ge=GUEST_MB)
    """MB of memory for the guest with its preloaded modules, in addition to a container's memory
    class."""


def _settings(name: str, text: str) -> ImageSettings:
    """Parse the content of `image.toml`. Raises WrongRecipe if it is not TOML, or has an invalid
    key or value.
    """
    try:
        return ImageSettings.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        fault = f"it is not TOML ({error})"
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"])
        fault = f"{key}: {first['msg'].removeprefix('Value error, ')}"
    raise WrongRecipe(f"image.toml of the image {name}: {fault}.")


PACKAGE_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
"""Regular expression for the name of a Python package."""

_PINNED = re.compile(rf"({PACKAGE_NAME})==([A-Za-z0-9][A-Za-z0-9.!+_-]{{0,63}})(.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class WrongRequirements(Exception):
    """A list of packages is invalid. The message names the line or file, and the reason."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One exact version of a package, and the hashes of the files that may be installed for it."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of each acceptable file, as hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The exact versions of all packages to install, including dependencies."""

    packages: tuple[Pinned, ...] = ()

    @property
    def text(self) -> str:
        """The text of the lock, in pip's format."""
        lines = (
            f"{each.name}=={each.version}"
            + "".join(f" \\\n    --hash=sha256:{digest}" for digest in each.hashes)
            for each in self.packages
        )
        return "".join(f"{line}\n" for line in lines)


def parse_lock(text: str) -> Lock:
    """Parse the text of a lock in pip's format, such as `requirements.lock`.

    Raises:
        WrongRequirements: a line is not a package with a version and hashes.
    """
    return Lock(tuple(_pinned(line) for line in lines_of(text)))


def normalized(name: str) -> str:
    """Return a package's name in the normal form, in which package indexes compare names. *Source*:
    PEP 503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def lines_of(text: str) -> list[str]:
    """Return the lines of a requirements file, without comments and blank lines. Continued lines
    are joined.
    """
    joined = text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _pinned(line: str) -> Pinned:
    match = _PINNED.fullmatch(line)
    if match is None:
        raise WrongRequirements(f"{shown(line)} is not NAME==VERSION with hashes.")
    words = match[3].split()
    hashes = [_HASH.fullmatch(word) for word in words]
    if not words or None in hashes:
        raise WrongRequirements(f"{match[1]}: everything after its version must be a hash.")
    return Pinned(
        normalized(match[1]), match[2], tuple(found[1] for found in hashes if found is not None)
    )


def shown(line: str) -> str:
    """Return the beginning of a line in quotation marks, for an error message."""
    return repr(line[:80])
