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
import io
import json
import os
import re
import tarfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Annotated

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

LAYER = "opt/fumehood/packages"
"""Path of the folder of Python packages that are requested for calls and sessions, in the layer on
top of an image."""

LOCKED = "opt/fumehood/requirements.lock"
"""Path of the list of an image's own Python packages, which is for information only."""

FONTS = "opt/fumehood/matplotlib"
"""Path of Matplotlib's font cache in an image."""

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
    """There is no recipe with the name of the requested image."""


class WrongRecipe(Exception):
    """An image's recipe, or the requested base, is invalid."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources that determine an image. `files` contains pairs of a file name and content."""

    name: str
    settings: ImageSettings
    packages: tuple[str, ...]
    lock: Lock
    files: tuple[tuple[str, bytes], ...]
    base: str = ""
    """The existing image to start from, with its digest, or empty to build a root file system."""

    @property
    def digest(self) -> str:
        """SHA-256 over the base and all files, as hexadecimal digits."""
        return _digest((("base", self.base.encode()), ("about", self.about), *self.files))

    @property
    def root_digest(self) -> str:
        """SHA-256 over the sources of the root file system, as hexadecimal digits. Images with the
        same Debian packages share a root file system.
        """
        packages = "\n".join(sorted(self.packages)).encode()
        parts = [("base", self.base.encode()), ("release", self.release.encode())]
        parts += [("packages", packages), ("finish", self.file("finish"))]
        parts += [("Dockerfile", self.file("Dockerfile"))] if self.base else []
        return _digest(tuple(parts))

    @property
    def release(self) -> str:
        """The Debian release."""
        return self.settings.release

    @property
    def about(self) -> bytes:
        """The image's description for its guest, as the content of a JSON file."""
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
        """Return one file's content.

        Raises:
            WrongRecipe: the file is missing.
        """
        return _content(self.name, self.files, name)


def images_folder() -> Path:
    """Return the path of `sandbox_images` in the installed package or in the checkout."""
    installed = PACKAGE / "sandbox_images"
    return installed if installed.is_dir() else PACKAGE.parents[1] / "sandbox_images"


def image_names(folder: Path | None = None, *, own: Path | None = None) -> list[str]:
    """Return the names of all recipes: built-in ones, and those in the operator's folder `own`."""
    ours = {file.parent.name for file in (folder or images_folder()).glob("*/image.toml")}
    theirs = set() if own is None else {file.parent.name for file in own.glob("*/image.toml")}
    return sorted(ours | {name for name in theirs if _IMAGE_NAME.fullmatch(name)})


def read_recipe(
    name: str, *, base: str = "", folder: Path | None = None, own: Path | None = None
) -> Recipe:
    """Read the recipe of one image. A built-in image has precedence.

    Raises:
        UnknownImage: no recipe has this name.
        WrongRecipe: its files or `base` are invalid.
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
    """Return the recipe that consists of these files.

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
    packages = listed(_text(name, files, "packages.txt"))
    for package in packages:
        if not is_debian_package(package):
            raise WrongRecipe(f"{package[:80]!r} in packages.txt is not the name of a package.")
    return Recipe(name, settings, packages, lock, files, base)


def is_debian_package(name: str) -> bool:
    """Whether a text is a valid name of a Debian package."""
    return _DEBIAN_PACKAGE.fullmatch(name) is not None


def is_own_name(name: str) -> bool:
    """Whether an operator may give this name to an image. The names of built-in images, and those
    that this package uses for layers in Docker, are reserved.
    """
    taken = name in image_names() or name in (COMMON, "root", "base", "building", "packages")
    return _IMAGE_NAME.fullmatch(name) is not None and not (
        taken or name.startswith(("base-", "building-"))
    )


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
    """Return the shared files, except those that the image's folder replaces."""
    found = sorted((images_folder() / COMMON).glob("*"))
    return tuple((path.name, path.read_bytes()) for path in found if path.name not in known)


@cache
def guest_digest() -> str:
    """Return the SHA-256 over the files of this engine's guest, as hexadecimal digits."""
    return _digest(guest_files())


def guest_files(package: Path = PACKAGE) -> tuple[tuple[str, bytes], ...]:
    """Return the guest's files: path relative to the package and content, sorted by path."""
    found = [package / "__init__.py", *(package / "protocol" / name for name in _PROTOCOL)]
    found += (path for path in (package / "guest").rglob("*") if path.suffix in (".py", ".js"))
    pairs = [(path.relative_to(package).as_posix(), path.read_bytes()) for path in found]
    return tuple(sorted(pairs))


def guest_archive(about: bytes = b"{}") -> bytes:
    """Return a tar archive of the guest and the image's description `about`, to be unpacked at the
    root of a file system.

    The files are owned by root and writable only by root.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folders = {GUEST_HOME, str(Path(ABOUT).parent)}
        for path, _ in guest_files():
            folders.update(f"{GUEST_HOME}/{parent}" for parent in Path(path).parents[:-1])
        for folder in sorted(folders):
            add_folder(archive, folder)
        for path, content in guest_files():
            add_file(archive, f"{GUEST_HOME}/{path}", content)
        add_file(archive, ABOUT, about)
    return buffer.getvalue()


def add_file(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    """Add a file that is owned by root and writable only by root."""
    add_stream(archive, path, io.BytesIO(content), len(content))


def add_stream(archive: tarfile.TarFile, path: str, content: IO[bytes], size: int) -> None:
    """Add a file of `size` bytes. Its owner and mode are those of files added with `add_file`."""
    member = tarfile.TarInfo(path)
    member.size = size
    archive.addfile(member, content)


def add_folder(archive: tarfile.TarFile, path: str) -> None:
    """Add a folder that is owned by root and writable only by root."""
    member = tarfile.TarInfo(path)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(member)


def listed(text: str) -> tuple[str, ...]:
    """Return the lines of a list without comments and blank lines."""
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def _digest(pairs: tuple[tuple[str, bytes], ...]) -> str:
    """Return the SHA-256 over names and contents, as hexadecimal digits. The hash includes the
    lengths of names and contents, so that no two lists collide.
    """
    total = hashlib.sha256()
    for name, content in pairs:
        for part in (name.encode(), content):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


# -- files of the operator's own images ----------------------------------------------------


def read_own_files(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """Read the files of an operator's own image. Return pairs of name and content, sorted by name.

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
    """The values of `image.toml`, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
    """Parse `image.toml`. Raises WrongRecipe if it is not TOML, or has an invalid key or value."""
    try:
        return ImageSettings.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        fault = f"it is not TOML ({error})"
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"])
        fault = f"{key}: {first['msg'].removeprefix('Value error, ')}"
    raise WrongRecipe(f"image.toml of the image {name}: {fault}.")


_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
_EXTRAS = rf"\[\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\]"
_VERSION = r"(?:~=|==|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+*_-]{0,63}"
_MARKER = r"(?!-|.*[ ;]-)[A-Za-z0-9_.'\"<>=!~() -]{1,300}"
"""An environment marker. No word may begin with a hyphen, because pip would interpret it as an
option, even within quotes, and some of pip's options build packages, which runs their code here.
"""
_REQUIREMENT = re.compile(
    rf"({_NAME})\s*(?:{_EXTRAS})?\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*(?:;{_MARKER})?"
)
"""A requirement. *Source*: PEP 508, without the form `NAME @ URL`."""

_ARCHIVES = (
    ".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".tlz", ".lz", ".lzma",
)  # fmt: skip
"""Suffixes that make pip interpret a requirement as a file's path."""

_PINNED = re.compile(rf"({_NAME})==([A-Za-z0-9][A-Za-z0-9.!+_-]{{0,63}})(.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class WrongRequirements(Exception):
    """A list of packages is refused. The message names the line or file, and the reason."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One version of a package."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of each acceptable file, as hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Lock:
    """All installed packages, including dependencies."""

    packages: tuple[Pinned, ...] = ()

    @property
    def text(self) -> str:
        """The lock in pip's format."""
        lines = (
            f"{each.name}=={each.version}"
            + "".join(f" \\\n    --hash=sha256:{digest}" for digest in each.hashes)
            for each in self.packages
        )
        return "".join(f"{line}\n" for line in lines)

    @property
    def pins(self) -> tuple[str, ...]:
        """The packages without their hashes, as NAME==VERSION."""
        return tuple(f"{each.name}=={each.version}" for each in self.packages)

    def without(self, other: Lock) -> Lock:
        """Return the packages that another lock does not name."""
        names = {each.name for each in other.packages}
        return Lock(tuple(each for each in self.packages if each.name not in names))


EMPTY_LOCK = Lock()


def parse_lock(text: str) -> Lock:
    """Parse `requirements.lock`.

    Raises:
        WrongRequirements: a line is not a package with a version and hashes.
    """
    return Lock(tuple(_pinned(line) for line in _lines(text)))


def parse_requirements(text: str) -> dict[str, str]:
    """Parse a requirements file: normalized name of each package → its line.

    Raises:
        WrongRequirements: a line is not a name with optional extras, versions and marker, or two
            lines name the same package.
    """
    found: dict[str, str] = {}
    for line in _lines(text):
        match = _REQUIREMENT.fullmatch(line)
        if match is None or _may_be_a_file(match[1]) or _may_be_a_file(line.partition(";")[0]):
            raise WrongRequirements(f"{_shown(line)} {_why_refused(line)}")
        name = normalized(match[1])
        if name in found:
            raise WrongRequirements(
                f"{name} is named twice: write all its versions together, as in {name}>4,<5."
            )
        found[name] = line
    return found


def lock_of(wheels: Iterable[Path]) -> Lock:
    """Return the lock that accepts exactly these files.

    Raises:
        WrongRequirements: a file's name is not a wheel's name, or cannot be written in a lock.
    """
    packages = []
    for wheel in wheels:
        parts = wheel.name.removesuffix(".whl").split("-")
        if not wheel.name.endswith(".whl") or len(parts) not in (5, 6):
            raise WrongRequirements(f"{_shown(wheel.name)} is no wheel.")
        packages.append(Pinned(normalized(parts[0]), parts[1], (digest_of_file(wheel),)))
    lock = Lock(tuple(sorted(packages, key=lambda package: package.name)))
    return parse_lock(lock.text)  # ensures that the stored lock can be read again


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def normalized(name: str) -> str:
    """Return a package's name in the form in which the index compares names. *Source*: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def merged(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Merge two parsed lists, and return the text of the merged list. If both name a package, the
    line in `theirs` is used.
    """
    return "".join(f"{line}\n" for _, line in sorted({**ours, **theirs}.items()))


def _lines(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _pinned(line: str) -> Pinned:
    match = _PINNED.fullmatch(line)
    if match is None:
        raise WrongRequirements(f"{_shown(line)} is not NAME==VERSION with hashes.")
    words = match[3].split()
    hashes = [_HASH.fullmatch(word) for word in words]
    if not words or None in hashes:
        raise WrongRequirements(f"{match[1]}: everything after its version must be a hash.")
    return Pinned(
        normalized(match[1]), match[2], tuple(found[1] for found in hashes if found is not None)
    )


def _may_be_a_file(words: str) -> bool:
    """Whether pip would look for a file with this name, as it does for `name==1.0.zip`."""
    return words.rstrip().lower().endswith(_ARCHIVES)


def _why_refused(line: str) -> str:
    if line.startswith("-"):
        return "is an option: the list holds packages only."
    if "@" in line or "://" in line:
        return "is an address: packages come from the configured index only."
    if line.startswith((".", "/", "~")) or _may_be_a_file(line.partition(";")[0]):
        return "is a path: packages come from the configured index only."
    return "is not a package: write NAME, NAME[EXTRA] or NAME==VERSION, and a marker after ';'."


def _shown(line: str) -> str:
    return repr(line[:80])
