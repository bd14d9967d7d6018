"""Makes the root file system of an image as a tar file, with `mmdebstrap` or from an existing
image.

Host side. `mmdebstrap` needs root. The other way needs Docker and a network. Both install the same
packages, and then run the script `finish` of the image's recipe. Invariant: only the recipe
determines which files of this host are copied into the file system.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import docker
from docker.errors import APIError, BuildError, ImageNotFound

from fumehood.images.archive import add_file
from fumehood.sandbox.images.recipe import Recipe

OnStep = Callable[[str], None]
"""A function that receives a short description of each step when the step begins."""

DEADLINE_S = 900
"""Maximum seconds for making a root file system."""

END_PATIENCE_S = 30
"""Seconds that a program has to end after SIGTERM. Then it is killed."""

LINES_SEARCHED = 40
"""Number of output lines of a failed program, counted from the end, that are searched for a known
cause.
"""

PACKAGES_NETWORK = "default"
"""The Docker network of the container that installs packages into a base. It must not be the host's
network, through which the base could reach everything that listens on loopback.
"""

MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
"""The hook of mmdebstrap that makes `/bin`, `/lib` and `/sbin` links into `/usr`. It may not be
installed.
"""

_VERBS = ("running apt-get", "downloading", "extracting", "installing", "creating")
_STEPS = tuple(f"I: {verb} " for verb in _VERBS)


def make_root(recipe: Recipe, target: Path, on_step: OnStep) -> None:
    """Install the packages of the recipe into a new Debian system, and write the system to the tar
    file `target`.

    Raises:
        ImageBuildError: a step failed. The message names the remedy.
    """
    if os.geteuid() != 0:
        raise ImageBuildError(
            "Making a root file system needs root.",
            "Run it as root, or name a base: fumehood images build NAME --base REF@DIGEST",
        )
    program = shutil.which("mmdebstrap")
    if program is None:
        raise ImageBuildError(
            "mmdebstrap is not installed.",
            "apt-get install mmdebstrap, or name a base: --base REF@DIGEST",
        )
    finish = target.with_name("finish")
    finish.write_bytes(recipe.file("finish"))
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)}
    # mmdebstrap runs some steps as another user, who needs access to the files in this directory.
    target.parent.chmod(0o711)
    command = [
        program, "--variant=minbase", "--mode=root", "--format=tar",
        f"--include={','.join(recipe.packages)}",
        # The script `finish` removes unneeded files, because mmdebstrap's own path filter is
        # slower.
        *([f"--hook-dir={MERGED_USR}"] if MERGED_USR.is_dir() else []),
        f"--customize-hook=chroot \"$1\" sh -s < {shlex.quote(str(finish))}",
        recipe.release, str(target),
    ]  # fmt: skip

    def on_line(line: str) -> None:
        if line.startswith(_STEPS):
            on_step(line.removeprefix("I: ").strip().rstrip("."))

    status, output = run_program(
        command, deadline_s=DEADLINE_S, environment=environment, on_line=on_line
    )
    if status != 0:
        raise build_error("mmdebstrap failed", output[-LINES_SEARCHED:])


def run_program(
    command: list[str],
    *,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> tuple[int, list[str]]:
    """Run a program. Return its exit status and the lines that it printed. If it still runs after
    `deadline_s` seconds, end it.

    `on_line` receives each line as soon as the program prints it.
    """
    output: list[str] = []
    with subprocess.Popen(  # noqa: S603 - callers build the command from checked names
        command,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:

        def give_up() -> None:
            output.append(f"it took longer than {deadline_s} s")
            _end(process)

        clock = threading.Timer(deadline_s, give_up)
        clock.start()
        try:
            for line in process.stdout or ():
                output.append(line.rstrip())
                on_line(line)
            return process.wait(deadline_s), output
        except BaseException:
            _end(process)
            raise
        finally:
            clock.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM to a program, so that it can clean up its mounts and files. If it has not ended
    after `END_PATIENCE_S` seconds, kill it.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_PATIENCE_S)


def make_root_from_base(
    client: docker.APIClient, recipe: Recipe, target: Path, on_step: OnStep
) -> None:
    """Install the packages of the recipe into its base image, and write the resulting file system
    to the tar file `target`.

    Raises:
        ImageBuildError: a step failed. The message names the remedy.
    """
    _pull(client, recipe.base, on_step)
    on_step("installing packages into the base")
    output: deque[str] = deque(maxlen=LINES_SEARCHED)
    tag = f"fumehood/building-{recipe.name}:{recipe.digest[:12]}"
    steps = client.build(
        fileobj=io.BytesIO(_context(recipe)), custom_context=True, tag=tag, rm=True,
        forcerm=True, buildargs={"BASE": recipe.base}, decode=True, timeout=DEADLINE_S,
        network_mode=PACKAGES_NETWORK,
    )  # fmt: skip
    failed = False
    for step in steps:
        output.extend(str(step.get("stream", step.get("error", ""))).splitlines())
        failed = failed or "error" in step
    if failed:
        raise build_error("The packages could not be installed into the base", output)
    try:
        _flatten(client, tag, target, on_step)
    finally:
        client.remove_image(tag, noprune=False)


def _pull(client: docker.APIClient, base: str, on_step: OnStep) -> None:
    on_step(f"fetching {base[:60]}")
    try:
        for line in client.pull(base, stream=True, decode=True):
            if "error" in line:
                raise build_error("The base cannot be fetched", [str(line["error"])])
        client.inspect_image(base)
    except (APIError, BuildError, ImageNotFound) as error:
        raise build_error("The base cannot be fetched", [str(error)]) from None


def _context(recipe: Recipe) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in recipe.files:
            add_file(archive, name, content)
    return buffer.getvalue()


def _flatten(client: docker.APIClient, tag: str, target: Path, on_step: OnStep) -> None:
    """Write the file system of the image `tag` to the tar file `target`, as a single layer. The tar
    file therefore contains no files that an upper layer of the image has removed.
    """
    on_step("flattening it into one layer")
    container = client.create_container(tag, command=["true"])["Id"]
    try:
        with target.open("wb") as file:
            file.writelines(client.export(container, chunk_size=1 << 20))
    finally:
        client.remove_container(container, force=True)


_SIGNS = (
    (
        ("No space left on device", "no space left on device", "not enough free space"),
        "There is no disk space left.",
        "Make room (an image needs about 1 GB while it is built), or set TMPDIR to a larger disk.",
    ),
    (
        (
            "Temporary failure resolving", "Could not resolve", "Failed to fetch",
            "Unable to connect", "Could not connect", "Network is unreachable",
            "no such host", "connection refused", "i/o timeout", "TLS handshake",
            "NewConnectionError", "Max retries exceeded", "ConnectTimeoutError", "ProxyError",
            "Read timed out", "Connection broken", "SSLError",
        ),
        "The package mirror, index or registry cannot be reached.",
        "Check the network and the proxy variables (http_proxy, https_proxy).",
    ),
    (
        ("Unable to locate package", "has no installation candidate"),
        "A package of the list does not exist in this release.",
        "Check packages.txt and the release; a base must be Debian of the same release.",
    ),
    (
        ("DO NOT MATCH THE HASHES",),
        "A file is not the one that was locked.",
        "The index may have changed it. Lock again only if you know why.",
    ),
    (
        ("manifest unknown", "not found", "repository does not exist"),
        "There is no such image.",
        "Check the name and the digest.",
    ),
    (
        ("nodev", "noexec"),
        "The directory for temporary files cannot hold a root file system.",
        "Set TMPDIR to a directory that is mounted without nodev and noexec.",
    ),
)  # fmt: skip
"""Rows of texts that may occur in a program's output, the cause that they show, and the remedy."""

LINES_SHOWN = 5
"""Number of output lines, counted from the end, that an error shows if the cause is unknown."""


CAUSE_UNKNOWN = "Fix that and build again."
"""The remedy for an unknown cause. The message then also contains the output of the step."""


class ImageBuildError(Exception):
    """An image was not built. The message tells the operator the cause (`found`) and the
    `remedy`.
    """

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found} {remedy}")
        self.found = found
        self.remedy = remedy


def build_error(what: str, output: Iterable[str]) -> ImageBuildError:
    """Return the error for a failed step. `what` says which step failed, and begins the message.
    `output` contains the last lines that the step printed.

    If the output shows a known cause, the error names this cause and its remedy. Otherwise it shows
    the output.
    """
    lines = [line for line in output if line.strip()]
    text = "\n".join(lines)
    for signs, found, remedy in _SIGNS:
        if any(sign in text for sign in signs):
            return ImageBuildError(f"{what}: {found}", remedy)
    last = " | ".join(line.strip()[:200] for line in lines[-LINES_SHOWN:]) or "it printed nothing"
    return ImageBuildError(f"{what}: {last}.", CAUSE_UNKNOWN)
