"""Download wheels from the Python index with pip, for the image's Python instead of the host's.

Host side. Only wheels are accepted: building a source package would run its code here. Invariant:
no code of a package runs on the host, and a file for a locked package is accepted only if its hash
is in the lock. pip's own configuration selects the index.
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

from fumehood.sandbox.images import pip_for_image
from fumehood.sandbox.images.recipe import EMPTY_LOCK, Lock, Pinned, digest_of_file, lock_of
from fumehood.sandbox.images.rootfs import (
    ImageBuildError,
    OnStep,
    build_error,
    run_program,
)

DEADLINE_S = 600
"""Seconds for one run of pip."""

PATIENCE = ("--timeout=20", "--retries=2", "--no-cache-dir")
"""Options of pip: seconds to wait for the index, how often to repeat a request, and no cache beside
that of wheels, which is bounded.
"""

PYTHONS = {"bookworm": ("3.11.2", 36)}
"""Debian release → its Python version, and the minor version of its glibc 2."""

OLDEST_GLIBC = 5
"""Minor version of the oldest glibc 2 that wheels are built for. *Source*: PEP 600; `manylinux1` is
2.5, `manylinux2010` 2.12, `manylinux2014` 2.17."""

_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")
_CONFLICT = "The conflict is caused by:"
"""The line of pip's output before the causes of a conflict."""

CAUSES_SHOWN = 6
"""Maximum number of causes of a conflict that an error shows."""


class PackagesRefused(ImageBuildError):
    """The index was asked, and the packages cannot be had, or not together."""


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
    """Find compatible versions, including all dependencies, and put their wheels into `cache`.

    The packages of `below` are there already: they keep their versions, and are left out.

    Raises:
        ImageBuildError: pip failed; the message names the remedy.
    """
    on_step("looking packages up in the Python index")
    there = "".join(f"{each}\n" for each in below.pins)
    texts = {"requirement": requirements, "constraint": there}
    return lock_of(_download(cache, release, texts, deadline_s=deadline_s)).without(below)


def fetch(lock: Lock, release: str, cache: Path, on_step: OnStep) -> list[Path]:
    """Return one wheel for each locked package, from `cache` if possible.

    Raises:
        ImageBuildError: pip or the cache failed; the message names the remedy.
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
    """Download wheels into the cache, and return them. `texts` are files that pip reads, by the
    name of the option that takes them.
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
    """Remove the oldest wheels of a cache until it is at most this large, and what a killed
    download left in it.
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
    """Return a cached wheel with a locked hash, or None.

    It must suit this machine's architecture: machines of several kinds may share a home directory.
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
    """Return the values of environment markers in the image, as JSON. *Source*: PEP 508."""
    version, _ = _python_of(release)
    return json.dumps({
        "implementation_name": "cpython", "implementation_version": version, "os_name": "posix",
        "platform_machine": platform.machine(), "platform_release": pip_for_image.SIGN,
        "platform_system": "Linux", "platform_version": "", "python_full_version": version,
        "platform_python_implementation": "CPython",
        "python_version": ".".join(version.split(".")[:2]), "sys_platform": "linux",
    })  # fmt: skip


def _pip(arguments: list[str], release: str, deadline_s: float | None = None) -> None:
    """Run pip for the image's Python. Raises ImageBuildError if it fails or takes too long."""
    options = ["--disable-pip-version-check", "--no-input", "--no-color", *PATIENCE]
    status, said = _run(
        [_python_with_pip(), "-I", pip_for_image.__file__, _markers(release), *arguments, *options],
        deadline_s,
    )
    if status != 0:
        raise _pip_error(said)


def _run(command: list[str], deadline_s: float | None = None) -> tuple[int, str]:
    # In an empty directory, because pip could install files from the current one.
    with tempfile.TemporaryDirectory(prefix="fumehood-pip-") as nowhere:
        status, lines = run_program(
            command,
            deadline_s=deadline_s or DEADLINE_S,
            environment={**os.environ, "TMPDIR": nowhere},  # what an ended pip leaves goes with it
            directory=Path(nowhere),
        )
    return status, "\n".join(lines)


def _python_with_pip() -> str:
    """Return the path of a Python with pip: this one or, if it lacks pip, the system's."""
    for python in (sys.executable, shutil.which("python3")):
        if python and _run([python, "-I", "-c", "import pip"])[0] == 0:
            return python
    raise ImageBuildError(
        "Packages of the Python index are fetched with pip, which is not installed.",
        f"{sys.executable} -m ensurepip, or apt-get install python3-pip",
    )


def _pip_error(said: str) -> ImageBuildError:
    """Convert pip's output to an error with a remedy."""
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
