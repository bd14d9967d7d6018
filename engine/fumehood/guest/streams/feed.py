"""The stream through which the host feeds bytes to one of the engine's own programs.

Guest side, used by the supervisor. The stream has a single connection, in one direction: the guest
writes the host's bytes into the pipe on which the program received its request. The host first
sends as many bytes as its window allows, and then more as the program reads.
"""

from __future__ import annotations

import contextlib
import fcntl

from fumehood.guest.container import streams
from fumehood.guest.container.run import Run, is_running
from fumehood.protocol.connections import ONLY, Segment, taken
from fumehood.protocol.streams import StreamFrame


class End(streams.End):
    """Passes bytes from the host to the current run's program. Used only if the host has announced
    at the start of the run that it will send bytes.
    """

    def begin(self, run: Run, told: str) -> None:
        """Allow the host to send as many bytes as `told` says. `told` is a number in decimal
        digits.
        """
        assert run.child is not None
        self._window = int(told)
        self._fed_bytes = 0
        with contextlib.suppress(OSError):  # without this it only takes longer
            fcntl.fcntl(run.child.request_fd, fcntl.F_SETPIPE_SZ, self._window)
        self._take(run, self._window)

    def on_frame(self, run: Run | None, frame: StreamFrame) -> None:
        """Pass bytes from the host to the run's program, unless the program has ended."""
        if run is not None and run.id == frame.run_id and is_running(run):
            data = Segment.parse(frame.body).data
            self._fed_bytes += len(data)
            self.place.write(run, data)

    def on_written(self, run: Run) -> None:
        """Report to the host how many of its bytes were written to the program since the last
        report. The host may then send as many new bytes.

        If bytes still wait to be written, report only when the number has reached a quarter of the
        host's window.
        """
        taken_bytes = self._fed_bytes - min(self._fed_bytes, len(run.request))
        if taken_bytes and (not run.request or taken_bytes >= self._window // 4):
            self._fed_bytes -= taken_bytes
            self._take(run, taken_bytes)

    def _take(self, run: Run, count: int) -> None:
        body = taken(ONLY, count).encode()
        self.place.host.send_frame(StreamFrame(self.kind, run.id, body))
