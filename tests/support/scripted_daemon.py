"""Daemons that a module of `tests` serves: everything but its walls or its tools is real."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import Daemon, launch, make_first_approver, wait_until_ready


@contextmanager
def daemon_of(
    module: str, directory: Path, *, credential: str = "", **settings: str
) -> Iterator[Daemon]:
    """Run the module until ready, and stop it afterwards."""
    daemon = launch(directory, module=module, **settings)
    daemon.credential = credential
    try:
        yield wait_until_ready(daemon)
        assert daemon.stop() in (0, -9), daemon.log
    finally:
        daemon.process.kill()
        daemon.process.wait(timeout=30)


@contextmanager
def running_scripted_daemon(
    home: Path | None = None, *, approver: bool = False, **settings: str
) -> Iterator[Daemon]:
    """Run a daemon with the wall of `support.container`; remove a directory made here."""
    directory = home or Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    credential = make_first_approver(directory) if approver else ""
    try:
        with daemon_of("support.container", directory, credential=credential, **settings) as daemon:
            yield daemon
    finally:
        if home is None:
            shutil.rmtree(directory, ignore_errors=True)
