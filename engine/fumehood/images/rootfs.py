"""Makes the root file system of an image as a tar file, with `mmdebstrap`.

Host side. `mmdebstrap` needs root, or the sub-ids of an ordinary user. A store can also make a root
file system from an existing image (`ImageStore.root_from_base`), which needs a network. Both
install the same packages, and then run the script `finish` of the image's recipe. Invariant: only
the recipe determines which files of this host are copied into the file system.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fumehood.image_store.faults import LINES_SEARCHED, ImageBuildError, build_error
from fumehood.image_store.store import OnStep
from fumehood.sandbox.images.recipe import Recipe

DEADLINE_S = 900
"""Maximum seconds for making a root file system."""

END_PATIENCE_S = 30
"""Seconds that a program has to end after SIGTERM. Then it is killed."""

MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
"""The hook of mmdebstrap that makes `/bin`, `/lib` and `/sbin` links into `/usr`. It may not be
installed.
"""

OTHERWISE = (
    "or use the programs of this host: fumehood images build host; or load an image: fumehood "
    "images load FILE; or, with Docker, name a base: fumehood images build NAME --base REF@DIGEST"
)
"""How an image can be had where no root file system can be made."""

_VERBS = ("running apt-get", "downloading", "extracting", "installing", "creating")
_STEPS = tuple(f"I: {verb} " for verb in _VERBS)


def make_root(recipe: Recipe, target: Path, on_step: OnStep) -> None:
    """Install the packages of the recipe into a new Debian system, and write the system to the tar
    file `target`.

    Raises:
        ImageBuildError: a step failed. The message names the remedy.
    """
    if os.geteuid() != 0 and shutil.which("newuidmap") is None:
        raise ImageBuildError(
            "Making a root file system needs root or, for an ordinary user, the program newuidmap.",
            f"apt-get install uidmap; {OTHERWISE}",
        )
    program = shutil.which("mmdebstrap")
    if program is None:
        raise ImageBuildError(
            "mmdebstrap is not installed.",
            f"apt-get install mmdebstrap; {OTHERWISE}",
        )
    finish = target.with_name("finish")
    finish.write_bytes(recipe.file("finish"))
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)}
    # mmdebstrap runs some steps as another user, who needs access to the files in this directory.
    target.parent.chmod(0o711)
    command = [
        program, "--variant=minbase", f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        "--format=tar",
        f"--include={','.join(recipe.packages)}",
        # `finish` removes apt's lists and its configuration. Without the latter, mmdebstrap's own
        # cleaning would remove the lists of this host.
        "--skip=cleanup/apt",
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
