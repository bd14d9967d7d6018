"""Daemons that a module of `tests` serves: everything but its walls or its tools is real."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from conftest import Daemon, launch, make_first_approver, wait_until_ready
from support.containers import remove_containers_of


@contextmanager
def daemon_of(
    module: str,
    home: Path | None = None,
    *,
    approver: bool = False,
    credential: str = "",
    **settings: str,
) -> Iterator[Daemon]:
    """Run the module until ready, and stop it afterwards; remove a directory made here."""
    directory = home or Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    credential = make_first_approver(directory) if approver else credential
    daemon = launch(directory, module=module, **settings)
    daemon.credential = credential
    try:
        yield wait_until_ready(daemon)
        assert daemon.stop() in (0, -9), daemon.log
    finally:
        daemon.process.kill()
        daemon.process.wait(timeout=600)
        # A stopping engine waits for Docker for some seconds only.
        remove_containers_of(directory)
        if home is None:
            shutil.rmtree(directory, ignore_errors=True)


running_scripted_daemon = partial(daemon_of, "support.container")
"""A daemon with the wall of `support.container`."""
