"""The channel to the host: a former host is told that it lost the container."""

from __future__ import annotations

import subprocess
import sys

FULL = """
import os, selectors
from fumehood.guest.container.host import Host

host = Host()
os.set_blocking(1, False)
sent = 0
while True:
    try:
        sent += os.write(1, b"." * 1000)
    except BlockingIOError:
        break
os.set_blocking(1, True)
former = host.use(*os.pipe())
os.write(2, str(sent).encode() + b"\\n")
with selectors.DefaultSelector() as selector:
    selector.register(former, selectors.EVENT_WRITE)
    selector.select()
host.dismiss(former)
"""


def test_former_host_that_reads_slowly_is_told_after_all_that_was_sent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FULL],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as guest:  # fmt: skip
        assert guest.stdout is not None
        assert guest.stderr is not None
        sent = int(guest.stderr.readline())
        received = guest.stdout.read()
    assert received[:sent] == b"." * sent
    assert b'"ready"' in received[sent:]
