"""A daemon with the wall of `support.container`: everything but the container is real."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import CLEAN_ENVIRONMENT, Daemon, make_first_approver, wait_until_ready
from support.preloaded import PYTHON

TESTS = Path(__file__).parents[1]


@contextmanager
def running_scripted_daemon(
    home: Path | None = None, *, approver: bool = False, **settings: str
) -> Iterator[Daemon]:
    """Run the daemon until ready; stop it afterwards and remove a directory made here."""
    directory = home or Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    credential = make_first_approver(directory) if approver else ""
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(directory)}
    environment |= {f"FUMEHOOD_{key.upper()}": value for key, value in settings.items()}
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "support.container"],
            env={**environment, "PYTHONPATH": str(TESTS)},
            cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    daemon = Daemon(process, directory, environment, credential)
    try:
        yield wait_until_ready(daemon)
        assert daemon.stop() in (0, -9), daemon.log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        if home is None:
            shutil.rmtree(directory, ignore_errors=True)
