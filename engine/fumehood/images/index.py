"""Downloads wheels from the Python index with pip, for the Python in an image instead of the
host's.

Host side. Only wheels are accepted, because to build a source package would run the package's code
here. Invariants: no code of a package runs on the host; a file for a locked package is accepted
only if its hash is in the lock. The configuration of pip itself selects the index.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from fumehood.image_store.faults import ImageBuildError, build_error
from fumehood.image_store.store import OnStep
from fumehood.images import pip_for_image
from fumehood.images.requirements import EMPTY_LOCK, digest_of_file, lock_of, without
from fumehood.images.rootfs import run_program
from fumehood.sandbox.images.recipe import Lock, Pinned

DEADLINE_S = 600
"""Maximum seconds for one run of pip, unless the caller gives another limit."""

PATIENCE = ("--timeout=20", "--retries=2", "--no-cache-dir")
"""Options of pip: how many seconds to wait for the index, how often to repeat a request, and not to
use a cache of pip's own, because only the cache of wheels has a size limit.
"""

PYTHONS = {"bookworm": ("3.11.2", 36)}
"""Debian release → the version of its Python, and the minor version of its glibc 2.x."""

OLDEST_GLIBC = 5
"""Minor version of the oldest glibc 2.x for which wheels are built. *Source*: PEP 600; `manylinux1`
needs 2.5, `manylinux2010` 2.12, and `manylinux2014` 2.17.
"""

_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")
_CONFLICT = "The conflict is caused by:"
"""The line in pip's output after which the causes of a version conflict follow."""

CAUSES_SHOWN = 6
"""Maximum number of causes of a version conflict that an error shows."""


class PackagesRefused(ImageBuildError):
    """Packages are not available, do not fit together, or cannot be unpacked."""


_MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)(.*)")


def resolve(
    requirements: str,
    release: str,
    cache: Path,
    on_step: OnStep,
    below: Lock = EMPTY_LOCK,
    *,
    deadline_s: float | None = None,
) -> Lock:
    """Find versions of the required packages, and of all their dependencies, that fit together.
    Store the wheels in `cache`, and return a lock that pins these versions.

    `requirements` is the text of a requirements file. `release` is the Debian release of the image.
    `below` contains the packages that the image already has: they keep their versions, and are not
    in the returned lock. `on_step` receives a description of the step. `deadline_s` limits pip's
    run.

    Raises:
        ImageBuildError: pip failed. The message names the remedy.
    """
    on_step("looking packages up in the Python index")
    there = "".join(f"{each.name}=={each.version}\n" for each in below.packages)
    texts = {"requirement": requirements, "constraint": there}
    return without(lock_of(_download(cache, release, texts, deadline_s=deadline_s)), below)


def fetch(lock: Lock, release: str, cache: Path, on_step: OnStep) -> list[Path]:
    """Return the paths of wheels in `cache`, one for each locked package. Those that are missing
    are downloaded first.

    `release` is the Debian release of the image. `on_step` receives a description of the download
    when the download begins.

    Raises:
        ImageBuildError: pip or the cache failed. The message names the remedy.
    """
    missing = Lock(tuple(each for each in lock.packages if _kept(cache, each) is None))
    if missing.packages:
        on_step(f"downloading from the Python index: {len(missing.packages)}")
        _download(cache, release, {"requirement": missing.text}, "--no-deps", "--require-hashes")
    found = [_kept(cache, each) for each in lock.packages]
    if None in found:
        raise ImageBuildError(
            f"The cache {cache} does not keep its files.", "Check its disk and permissions."
        )
    return [wheel for wheel in found if wheel is not None]


def _download(
    cache: Path,
    release: str,
    texts: Mapping[str, str],
    *options: str,
    deadline_s: float | None = None,
) -> list[Path]:
    """Download wheels into the cache with pip, and return their paths. `release` is the Debian
    release of the image.

    `texts` contains those options of `pip download` that take a file. It maps the option's name
    without `--` to the content of the file. `options` are further options.
    """
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as directory:
        for option, text in texts.items():
            (Path(directory) / option).write_text(text, encoding="utf-8")
        wheels = Path(directory) / "wheels"
        files = [f"--{option}={directory}/{option}" for option in texts]
        command = ["download", *_target(release), *options, f"--dest={wheels}", *files]
        _pip(command, release, deadline_s)
        return [_keep(cache, wheel) for wheel in sorted(wheels.glob("*"))]


def _keep(cache: Path, wheel: Path) -> Path:
    folder = cache / digest_of_file(wheel)
    folder.mkdir(exist_ok=True)
    return wheel.replace(folder / wheel.name)


def trim(cache: Path, most_bytes: int) -> None:
    """Remove the oldest wheels from a cache until its size is at most `most_bytes` bytes. Also
    remove the temporary directories of downloads that were killed.
    """
    wheels = sorted(cache.glob("*/*.whl"), key=lambda wheel: wheel.stat().st_mtime, reverse=True)
    total = 0
    for wheel in wheels:
        total += wheel.stat().st_size
        if total > most_bytes:
            shutil.rmtree(wheel.parent, ignore_errors=True)
    for left in cache.glob(".fetching-*"):
        if time.time() - left.stat().st_mtime > 2 * DEADLINE_S:
            shutil.rmtree(left, ignore_errors=True)


def _kept(cache: Path, package: Pinned) -> Path | None:
    """Return the path of a wheel in the cache whose hash the locked package accepts, or None if
    there is none.

    Wheels for other architectures are ignored. The cache can contain such wheels if it is in a home
    directory that several machines share.
    """
    for digest in package.hashes:
        for wheel in sorted((cache / digest).glob("*.whl")):
            tag = wheel.stem.rpartition("-")[2]
            is_for_us = tag == "any" or tag.endswith(f"_{platform.machine()}")
            if is_for_us and digest_of_file(wheel) == digest:
                return wheel
    return None


def _target(release: str) -> list[str]:
    version, glibc = _python_of(release)
    machine = platform.machine()
    minor = ".".join(version.split(".")[:2])
    abi = f"cp{minor.replace('.', '')}"
    platforms = [f"manylinux_2_{number}" for number in range(glibc, OLDEST_GLIBC - 1, -1)]
    return [
        "--only-binary=:all:", f"--python-version={minor}", "--implementation=cp",
        *(f"--abi={each}" for each in (abi, "abi3", "none")),
        *(f"--platform={each}_{machine}" for each in (*platforms, *_LEGACY, "linux")),
    ]  # fmt: skip


def _python_of(release: str) -> tuple[str, int]:
    if release not in PYTHONS:
        raise ImageBuildError(
            f"The Python version of {release} is unknown.",
            f"Packages of the Python index need one of: {', '.join(PYTHONS)}.",
        )
    return PYTHONS[release]


def _markers(release: str) -> str:
    """Return the environment markers of the Python in an image of this Debian release, as a JSON
    object. *Source*: PEP 508.
    """
    version, _ = _python_of(release)
    return json.dumps({
        "implementation_name": "cpython", "implementation_version": version, "os_name": "posix",
        "platform_machine": platform.machine(), "platform_release": pip_for_image.SIGN,
        "platform_system": "Linux", "platform_version": "", "python_full_version": version,
        "platform_python_implementation": "CPython",
        "python_version": ".".join(version.split(".")[:2]), "sys_platform": "linux",
    })  # fmt: skip


def _pip(arguments: list[str], release: str, deadline_s: float | None = None) -> None:
    """Run pip for the Python in an image of this Debian release. Raises ImageBuildError if pip
    fails or takes too long.
    """
    options = ["--disable-pip-version-check", "--no-input", "--no-color", *PATIENCE]
    status, said = _run(
        [_python_with_pip(), "-I", pip_for_image.__file__, _markers(release), *arguments, *options],
        deadline_s,
    )
    if status != 0:
        raise _pip_error(said)


def _run(command: list[str], deadline_s: float | None = None) -> tuple[int, str]:
    # The program runs in an empty directory, because pip could install files from the current one.
    with tempfile.TemporaryDirectory(prefix="fumehood-pip-") as nowhere:
        status, lines = run_program(
            command,
            deadline_s=deadline_s or DEADLINE_S,
            environment={**os.environ, "TMPDIR": nowhere},  # removed with the files of a killed pip
            directory=Path(nowhere),
        )
    return status, "\n".join(lines)


def _python_with_pip() -> str:
    """Return the path of a Python that has pip. If the Python that runs this process has none, use
    the system's.

    Raises:
        ImageBuildError: neither of them has pip.
    """
    for python in (sys.executable, shutil.which("python3")):
        if python and _run([python, "-I", "-c", "import pip"])[0] == 0:
            return python
    raise ImageBuildError(
        "Packages of the Python index are fetched with pip, which is not installed.",
        f"{sys.executable} -m ensurepip, or apt-get install python3-pip",
    )


def _pip_error(said: str) -> ImageBuildError:
    """Return the error for a run of pip that failed. `said` is what pip printed."""
    lines = [line for line in said.splitlines() if "is ignored: it is neither" not in line]
    lacks = _MISSING.search(said)
    if "Retrying (" in said:
        return build_error("The Python index", lines)
    if _CONFLICT in said:
        causes = [line.strip() for line in said.partition(_CONFLICT)[2].splitlines() if line]
        return PackagesRefused(
            f"The packages do not fit together: {'; '.join(causes[:CAUSES_SHOWN])[:500]}.",
            "Ask for other versions, or leave the version out.",
        )
    if lacks is None:
        return build_error("The Python index", lines)
    name, version = lacks[1], lacks[2].strip()
    if "from versions: none" not in said:
        return PackagesRefused(
            f"No version of {name} fits {(name + version)[:100]!r} and has a wheel for this image.",
            "Ask for another version.",
        )
    if _run([_python_with_pip(), "-I", "-m", "pip", "index", "versions", *PATIENCE, name])[0] == 0:
        return PackagesRefused(
            f"{name} has no wheel for this image, and packages are not built here.",
            "Ask for another version, or for a package that is published as a wheel.",
        )
    return PackagesRefused(f"The Python index has no package {name!r}.", "Check how it is written.")
